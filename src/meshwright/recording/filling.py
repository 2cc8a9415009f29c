"""A model without weights and the tape that fills them in, connected by the parameter names of the unsplit model."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.errors import JobError, Refused
from meshwright.recording import memory
from meshwright.recording.constants import sample
from meshwright.recording.dtensor import is_dtensor
from meshwright.recording.loose_tensors import TensorPlace, View, keep_aliases, loose_tensors, refresh_aliases
from meshwright.recording.memory import TensorTraits, copy_part, has_memory, named_tensors
from meshwright.recording.operation import Slot
from meshwright.recording.tape import Tape
from meshwright.torch_private.modes import without_tensor_classes
from meshwright.torch_private.tensors import make_subclass

Give = Callable[["str | int", torch.Tensor], None]
"""Receives the initial value of a parameter or buffer by its name, or the bytes of a loose storage by its number."""


@dataclass(frozen=True)
class LooseTensor:
    """A tensor of a model that is neither a parameter nor a buffer."""

    slot: Slot
    parameter: bool
    """Whether it is an nn.Parameter, of a module that is not registered as a child."""
    requires_grad: bool
    recorded: bool
    """Whether it has no values yet."""
    computed: str = ""
    """Its place, if the builder computed it from parameters."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.computed:
            return _computed(tensor, self.computed)
        if self.parameter:
            return nn.Parameter(tensor, requires_grad=self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device and the recording that makes its weights.

    A strategy may shard or replace parameters before they are filled; their names lead back to the recording. If the
    builder could not be recorded, the tape holds only the tensors of a real build, as constants.
    """

    model: nn.Module
    tape: Tape
    slots: dict[str, Slot]
    """Parameters and buffers by name; a tied tensor appears under each of its names."""
    attributes: dict[TensorPlace, LooseTensor] = field(default_factory=dict)
    traits: dict[str, TensorTraits] = field(default_factory=dict)
    doubt: str = ""
    """Why the builder was run for real; empty if it was recorded."""
    cost: str = ""
    """The memory and time that the real run took."""

    @property
    def loose_storages(self) -> list[int]:
        """Storages of the loose tensors, in an order that all ranks share."""
        return list(dict.fromkeys(loose.slot.storage for loose in self.attributes.values()))

    def play(self, give: Give) -> None:
        """Pass every initial value to `give` as soon as it is final. It is freed afterwards unless `give` keeps it."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, slot in self.slots.items():
            names[slot.storage].append(name)
        numbers = {key: number for number, key in enumerate(self.loose_storages)}

        def hand_over(key: int, storage: torch.UntypedStorage) -> None:
            for name in names.pop(key, ()):
                give(name, self.slots[name].on(storage))
            if key in numbers:
                give(numbers[key], torch.empty(0, dtype=torch.uint8).set_(storage))

        self.tape.play(hand_over)
        if names:
            missing = sorted(name for left in names.values() for name in left)
            raise JobError(
                f"The initial value of {', '.join(missing)} is unknown: the model's builder never wrote it; "
                "initialize it there."
            )

    def fill(
        self,
        device: torch.device | dict[str, torch.device],
        part: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        play: Callable[[Give], None] | None = None,
    ) -> str:
        """Allocate every parameter and buffer on `device`, set its initial value, and return a digest of the values.

        `device` may be a dict with a device for each name. `part(name, value)` is the part of a value that the model
        holds; the default is all of it. A parameter that was removed from the model (a pipeline stage holds only some)
        is skipped. `play` brings the values; the default is this process's own recording.
        """
        memory.allocate(self.model, device)
        self._give_traits()
        return self.put(part, play)

    def put(
        self,
        part: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        play: Callable[[Give], None] | None = None,
    ) -> str:
        """Like `fill`, but into memory that is already allocated."""
        targets, storages = dict(named_tensors(self.model)), self.loose_storages
        loose: dict[int, torch.UntypedStorage] = {}
        digest = hashlib.sha256()

        def give(key: str | int, value: torch.Tensor) -> None:
            digest.update(f"{key}{tuple(value.shape)}{sample(value)}".encode())
            if isinstance(key, int):
                loose[storages[key]] = value.untyped_storage()
            elif key in targets:
                copy_part(part(key, value) if part else value, targets[key])

        (play or self.play)(give)
        self._share(targets)
        self._put_loose(loose)
        refresh_aliases(self.model)
        return digest.hexdigest()

    def allocate(self, device: torch.device) -> None:
        """Allocate every parameter, buffer and plain attribute without a value, for steps on fake tensors."""
        if any(is_dtensor(tensor) for _, tensor in named_tensors(self.model)):
            memory.allocate(self.model, device)  # FSDP2 identifies its parameters by object, so they must stay
        else:
            memory.replace_all(self.model, device)
        self._give_traits()
        set_attributes(self.model, self.attributes, lambda slot: slot.scratch())

    @property
    def structure(self) -> str:
        """A digest of names, shapes and dtypes: equal on all ranks whose builders made the same tensors."""
        shapes = [(name, slot.size, slot.dtype) for name, slot in self.slots.items()]
        loose = [(str(place), one.slot.size, one.slot.dtype) for place, one in self.attributes.items()]
        return hashlib.sha256(repr((shapes, loose)).encode()).hexdigest()

    def release(self) -> None:
        """Drop the values that came from a real build or a file, and keep the structure."""
        self.tape.constants.release()

    def _give_traits(self) -> None:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in self.traits:
                self.traits[name].refuse(name, parameter, self.slots[name].size)
                self.traits[name].give_to(parameter)

    def _put_loose(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Set the loose tensors. They stay on the CPU, as plain attributes do under `module.to(device)`."""
        made: dict[LooseTensor, torch.Tensor] = {}
        for place, loose in self.attributes.items():
            storage = storages[loose.slot.storage]
            if loose.recorded or loose.computed or _address(place.take(self.model)) != storage.data_ptr():
                made.setdefault(loose, loose.of(loose.slot.on(storage)))
                place.put(self.model, made[loose])

    def _share(self, targets: dict[str, torch.Tensor]) -> None:
        """Restore shared memory between parameters and buffers that shared it in the builder."""
        for first, second in overlapping(self.slots, targets):
            one, other = targets[first], targets[second]
            if any(_is_changed(self.slots[name], targets[name]) for name in (first, second)):
                raise Refused(
                    f"{first} and {second} of the model share memory, but this strategy would separate them; use "
                    "single or ddp in fp32, or give each its own memory (clone it in the builder)."
                )
            offset = self.slots[second].offset - self.slots[first].offset + int(one.storage_offset())
            end = offset + len(self.slots[second].extent) // self.slots[second].dtype.itemsize
            if offset < 0 or end * one.itemsize > one.untyped_storage().nbytes():
                raise Refused(
                    f"{second} of the model reaches beyond {first}, whose memory it shares; clone it instead."
                )
            other.data = one.detach().as_strided(self.slots[second].size, self.slots[second].stride, offset)


def overlapping(slots: dict[str, Slot], held: Any) -> Iterator[tuple[str, str]]:
    """Pairs of names of different tensors that share memory, the larger tensor first."""
    by_storage: dict[int, list[str]] = defaultdict(list)
    for name, slot in slots.items():
        if name in held:
            by_storage[slot.storage].append(name)
    for names in by_storage.values():
        names.sort(key=lambda name: -len(slots[name].extent))
        for index, second in enumerate(names):
            for first in names[:index]:
                if held[first] is not held[second] and slots[first].overlaps(slots[second]):
                    yield first, second
                    break


def set_attributes(
    model: nn.Module, attributes: dict[TensorPlace, LooseTensor], tensor: Callable[[Slot], torch.Tensor]
) -> None:
    """Replace the loose tensors that have no values."""
    made: dict[LooseTensor, torch.Tensor] = {}
    for place, loose in attributes.items():
        if loose.recorded and not loose.computed:
            if loose not in made:
                made[loose] = loose.of(tensor(loose.slot))
            place.put(model, made[loose])


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """If a pass fails inside this context, remove what it left on the model, such as a table of rotary angles.

    The next attempt uses another kind of tensor, which could not be combined with it.
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


class ComputedTensor(torch.Tensor):
    """A tensor that the builder computed from parameters and kept. It can be read, but not used in a forward pass.

    Its gradient would flow to the initial parameters. The old weight normalisation keeps such a tensor and replaces it
    before each call.
    """

    place = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_tensor_classes():
            result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and isinstance(result, torch.Tensor) and func not in _READS:
            place = next((arg.place for arg in args if isinstance(arg, ComputedTensor)), "a tensor")
            raise JobError(
                f"The model uses {place}, which its builder computed from parameters, so it would not follow them in "
                "training. Compute it in forward."
            )
        return result.as_subclass(torch.Tensor) if isinstance(result, ComputedTensor) else result


_READS: tuple[Any, ...] = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


def _computed(tensor: torch.Tensor, place: str) -> torch.Tensor:
    made = make_subclass(ComputedTensor, tensor)
    made.place = place
    return made


def draw_up(model: nn.Module, tape: Tape) -> Blueprint:
    """The blueprint of a model that was recorded or built for real. Its parameters become meta tensors."""
    named = {name: tensor for name, tensor in named_tensors(model) if has_memory(tensor)}
    slots = {name: tape.slot(tensor) for name, tensor in named.items()}
    traits = {name: TensorTraits.of(p) for name, p in model.named_parameters(remove_duplicate=False)}
    attributes, aliases = _sort_loose(model, tape, slots, {id(tensor): name for name, tensor in named.items()})
    memory.drop_weights(model)
    keep_aliases(model, aliases)
    return Blueprint(model, tape, slots, attributes, traits)


def _sort_loose(
    model: nn.Module, tape: Tape, slots: dict[str, Slot], names: dict[int, str]
) -> tuple[dict[TensorPlace, LooseTensor], list[tuple[TensorPlace, str, View | None]]]:
    """Split the loose tensors into independent ones and aliases of parameters and buffers.

    A tensor that autograd has linked to a parameter is removed: it would keep the parameter's old memory alive.
    """
    attributes: dict[TensorPlace, LooseTensor] = {}
    aliases: list[tuple[TensorPlace, str, View | None]] = []
    owners: dict[int, list[tuple[str, Slot]]] = defaultdict(list)
    for name, slot in slots.items():
        owners[slot.storage].append((name, slot))
    for place, tensor in list(loose_tensors(model)):
        if id(tensor) in names:
            aliases.append((place, names[id(tensor)], None))
            continue
        if not has_memory(tensor):
            continue
        slot = tape.slot(tensor)
        if found := _view(slot, owners[slot.storage]):
            aliases.append((place, found[0], View(*found[1:], differentiable=tensor.requires_grad)))
            place.put(model, _computed(torch.empty(0), str(place)))
            continue
        computed = "" if tensor.grad_fn is None else str(place)
        if computed:
            place.put(model, _computed(torch.empty(0), computed))
        parameter = isinstance(tensor, nn.Parameter)
        attributes[place] = LooseTensor(slot, parameter, tensor.requires_grad, tensor.is_meta, computed)
    return attributes, aliases


def adopt(model: nn.Module) -> Blueprint:
    """The blueprint of an existing model: every tensor is a constant."""
    return draw_up(model, Tape(0))


def _view(slot: Slot, owners: list[tuple[str, Slot]]) -> tuple[str, Any, Any, Any, int] | None:
    """The parameter or buffer that a tensor is a view of, and the arguments of that `View`."""
    for name, owner in owners:
        inside = owner.extent.start <= slot.extent.start and slot.extent.stop <= owner.extent.stop
        if inside and slot.dtype == owner.dtype:
            return name, owner.size, slot.size, slot.stride, slot.offset - owner.offset
    return None


def _is_changed(slot: Slot, tensor: torch.Tensor) -> bool:
    layout = is_dtensor(tensor) or tuple(tensor.shape) != slot.size or tensor.stride() != slot.stride
    return layout or tensor.dtype != slot.dtype


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else 0
