"""A model without weights, and what fills them in: the unsplit model's names on one side, a tape on the other."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.describe.dtensor import is_dtensor
from meshwright.describe.tape import Slot, Tape, recording
from meshwright.errors import JobError, MeshwrightError, one_line


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device and the recording that makes its weights.

    A strategy may shard or replace parameters in between; names lead back to the recording.
    """

    model: nn.Module
    tape: Tape
    slots: dict[str, Slot]
    """Recorded parameters and buffers by name; tied ones once per name."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and buffers that the builder made from data, so they are real already."""
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Plain attributes with recorded tensors in them, by (module, attribute); slots stand for the tensors."""

    def fill(
        self,
        device: torch.device | dict[str, torch.device],
        part: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> str:
        """Give every parameter and buffer memory on `device` and its initial value; returns a digest of the values.

        `device` may be one for each name. `part(name, value)` is what the model holds of a value, where that is not
        all. A parameter that was taken out of the model (a stage of a pipeline holds only some) is passed over.
        """
        if isinstance(device, dict):
            _allocate_each(self.model, device)
        else:
            _allocate(self.model, device)
        targets = dict(_tensors(self.model))
        waiting: dict[int, list[str]] = defaultdict(list)
        for name, slot in self.slots.items():
            waiting[slot.storage].append(name)
        loose = {slot: torch.empty(0) for value in self.attributes.values() for slot in _slots(value)}

        digest = hashlib.sha256()

        def put(name: str, value: torch.Tensor) -> None:
            digest.update(f"{name}{tuple(value.shape)}{value.flatten()[:8].tolist()}".encode())
            if name in targets:
                _copy(part(name, value) if part else value, targets[name])

        def hand_over(key: int, storage: torch.UntypedStorage) -> None:
            for name in waiting.pop(key, ()):
                put(name, self.slots[name].on(storage))
            for slot in loose:
                if slot.storage == key:
                    loose[slot] = slot.on(storage).clone()

        self.tape.play(hand_over)
        for name, value in self.constants.items():
            put(name, value)
        # A plain attribute stays on the CPU, as it does under `module.to(device)`.
        set_attributes(self.model, self.attributes, loose.__getitem__)
        if waiting:
            missing = sorted(name for names in waiting.values() for name in names)
            raise JobError(f"The model's builder never made {', '.join(missing)}; its initial value is unknown.")
        return digest.hexdigest()

    def allocate(self, device: torch.device) -> None:
        """Give every parameter, buffer and plain attribute memory and no value, for steps on fake tensors."""
        if any(is_dtensor(tensor) for _, tensor in _tensors(self.model)):
            _allocate(self.model, device)  # FSDP2 knows its parameters by identity
        else:
            _replace(self.model, device)
        set_attributes(self.model, self.attributes, lambda slot: slot.scratch())


def record(build: Callable[[], nn.Module], seed: int) -> Blueprint:
    """Run a builder without giving its tensors memory."""
    try:
        with recording(seed) as tape:
            model = build()
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(
            f"The job's model cannot be built on the meta device: {one_line(error)} "
            "Its builder must not look at the values of weights."
        ) from error
    if not isinstance(model, nn.Module):
        raise JobError(f"Job(model=...) must give an nn.Module, but it gave {type(model).__name__}.")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise JobError(f"The model's parameter {lazy[0]} has no shape yet; give its module all its sizes.")
    return _blueprint(model, tape)


def adopt(model: nn.Module) -> Blueprint:
    """A blueprint of a model that exists already: every tensor is a constant."""
    return _blueprint(model, Tape(0))


def _blueprint(model: nn.Module, tape: Tape) -> Blueprint:
    named = dict(_tensors(model))
    slots = {name: tape.slot(tensor) for name, tensor in named.items() if tensor.is_meta}
    constants = {name: tensor.detach().clone() for name, tensor in named.items() if not tensor.is_meta}
    return Blueprint(model, tape, slots, constants, _plain_attributes(model, tape))


def set_attributes(
    model: nn.Module, attributes: dict[tuple[str, str], Any], tensor: Callable[[Slot], torch.Tensor]
) -> None:
    """Put tensors in the place of slots."""
    for (module, attribute), value in attributes.items():
        filled = tree_map(lambda leaf: tensor(leaf) if isinstance(leaf, Slot) else leaf, value)
        setattr(model.get_submodule(module), attribute, filled)


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """If a pass fails in here, the model loses what it kept of it for the next time, a table of angles for one.

    The next pass is on tensors of another kind, which would not go with it.
    """
    before = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for attributes, values, buffers in before:
            attributes.clear()
            attributes.update(values)
            attributes["_buffers"].clear()
            attributes["_buffers"].update(buffers)
        raise


def _plain_attributes(model: nn.Module, tape: Tape) -> dict[tuple[str, str], Any]:
    """Attributes that are recorded tensors, or lists, tuples and dicts of them, beside parameters and buffers."""
    found = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules") or not _holds_meta(value):
                continue
            slotted = tree_map(lambda leaf: tape.slot(leaf) if torch.is_tensor(leaf) and leaf.is_meta else leaf, value)
            found[name, attribute] = slotted
    return found


def _holds_meta(value: Any) -> bool:
    """Said at once of what most attributes are: a number, a word, an empty dict of hooks."""
    if value is None or isinstance(value, bool | int | float | str) or (isinstance(value, dict) and not value):
        return False
    return any(torch.is_tensor(leaf) and leaf.is_meta for leaf in tree_leaves(value))


def _slots(value: Any) -> list[Slot]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Slot)]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """`to_empty`, but swapping tensors in place: it would untie tied parameters otherwise."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _allocate_each(model: nn.Module, devices: dict[str, torch.device]) -> None:
    """Each tensor on the device of its name, of a tied one's first."""
    done: set[int] = set()
    for name, tensor in _tensors(model):
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        empty = torch.empty_like(tensor, device=devices[name])
        new = nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        torch.utils.swap_tensors(tensor, new)


def _replace(model: nn.Module, device: torch.device) -> None:
    """New tensors in the place of all: fake ones cannot be swapped. Tied ones stay tied."""
    new: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in new:
                    empty = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=device)
                    kept = isinstance(old, nn.Parameter)
                    new[id(old)] = nn.Parameter(empty, requires_grad=old.requires_grad) if kept else empty
                tensors[name] = new[id(old)]


@torch.no_grad()
def _copy(value: torch.Tensor, target: Any) -> None:
    if is_dtensor(target):
        from torch.distributed.tensor import distribute_tensor

        # Every rank has the same full value, so nothing needs to be sent.
        value = value.to(target.device)
        target.to_local().copy_(
            distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None).to_local()
        )
    else:
        target.copy_(value)
