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

from meshwright.errors import JobError, Refused
from meshwright.recording import memory
from meshwright.recording.aliases import View, keep_aliases, refresh_aliases
from meshwright.recording.constants import sample
from meshwright.recording.copy_part import copy_part
from meshwright.recording.dtensor import is_dtensor
from meshwright.recording.loose_tensors import TensorPlace, loose_tensors
from meshwright.recording.memory import TensorTraits, has_memory, named_tensors
from meshwright.recording.operation import Slot
from meshwright.recording.tape import Tape
from meshwright.torch_private.modes import without_tensor_classes
from meshwright.torch_private.tensors import make_subclass

Give = Callable[["str | int", torch.Tensor], None]
"""Takes the initial value of a parameter or buffer by its name, or the bytes of a loose storage by its number."""


@dataclass(frozen=True)
class LooseTensor:
    """A tensor that stands beside parameters and buffers."""

    slot: Slot
    parameter: bool
    """An nn.Parameter, of a module that is not registered for one."""
    requires_grad: bool
    recorded: bool
    """Whether it has no values yet."""
    computed: str = ""
    """The place of one that was computed from parameters."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.computed:
            return _computed(tensor, self.computed)
        if self.parameter:
            return nn.Parameter(tensor, requires_grad=self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device and the recording that makes its weights.

    A strategy may shard or replace parameters in between; names lead back to the recording. Where the builder could not
    be recorded, the tape holds the tensors of a real build as constants, and nothing else.
    """

    model: nn.Module
    tape: Tape
    slots: dict[str, Slot]
    """Parameters and buffers by name; tied ones once per name."""
    attributes: dict[TensorPlace, LooseTensor] = field(default_factory=dict)
    traits: dict[str, TensorTraits] = field(default_factory=dict)
    doubt: str = ""
    """Why the builder was run for real, if it was."""
    cost: str = ""
    """What that took."""

    @property
    def loose_storages(self) -> list[int]:
        """Storages of loose tensors that no parameter or buffer lies in, in an order that all ranks share."""
        return list(dict.fromkeys(loose.slot.storage for loose in self.attributes.values()))

    def play(self, give: Give) -> None:
        """Hand over every initial value, each when it is final. It is freed when `give` returns, unless kept."""
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
            raise JobError(f"The model's builder never made {', '.join(missing)}; its initial value is unknown.")

    def fill(
        self,
        device: torch.device | dict[str, torch.device],
        part: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        play: Callable[[Give], None] | None = None,
    ) -> str:
        """Give every parameter and buffer memory on `device` and its initial value; returns a digest of the values.

        `device` may be one for each name. `part(name, value)` is what the model holds of a value, where that is not
        all. A parameter that was taken out of the model (a stage of a pipeline holds only some) is passed over.
        `play` brings the values, where they are not to come from this process's own recording.
        """
        memory.allocate(self.model, device)
        self._give_traits()
        return self.put(part, play)

    def put(
        self,
        part: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        play: Callable[[Give], None] | None = None,
    ) -> str:
        """As `fill`, into memory that is there."""
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
        """Give every parameter, buffer and plain attribute memory and no value, for steps on fake tensors."""
        if any(is_dtensor(tensor) for _, tensor in named_tensors(self.model)):
            memory.allocate(self.model, device)  # FSDP2 knows its parameters by identity
        else:
            memory.replace_all(self.model, device)
        self._give_traits()
        set_attributes(self.model, self.attributes, lambda slot: slot.scratch())

    @property
    def structure(self) -> str:
        """The same for all ranks whose builders made the same tensors."""
        shapes = [(name, slot.size, slot.dtype) for name, slot in self.slots.items()]
        loose = [(str(place), one.slot.size, one.slot.dtype) for place, one in self.attributes.items()]
        return hashlib.sha256(repr((shapes, loose)).encode()).hexdigest()

    def release(self) -> None:
        """Forget the values that a real build or a file gave; what is left is the structure."""
        self.tape.constants.release()

    def _give_traits(self) -> None:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in self.traits:
                self.traits[name].refuse(name, parameter, self.slots[name].size)
                self.traits[name].give_to(parameter)

    def _put_loose(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """A plain attribute stays on the CPU, as it does under `module.to(device)`."""
        made: dict[LooseTensor, torch.Tensor] = {}
        for place, loose in self.attributes.items():
            storage = storages[loose.slot.storage]
            if loose.recorded or loose.computed or _address(place.take(self.model)) != storage.data_ptr():
                made.setdefault(loose, loose.of(loose.slot.on(storage)))
                place.put(self.model, made[loose])

    def _share(self, targets: dict[str, torch.Tensor]) -> None:
        """Parameters and buffers that lie in one another's memory do so again."""
        for first, second in overlapping(self.slots, targets):
            one, other = targets[first], targets[second]
            if any(_is_changed(self.slots[name], targets[name]) for name in (first, second)):
                raise Refused(
                    f"{first} and {second} of the model share memory, which this strategy would separate; use "
                    "single or ddp in fp32, or give each its own memory (clone it in the builder)."
                )
            offset = self.slots[second].offset - self.slots[first].offset + int(one.storage_offset())
            if offset < 0 or _end(offset, self.slots[second]) * one.itemsize > one.untyped_storage().nbytes():
                raise Refused(f"{second} of the model shows memory of {first} and more; give each its own memory.")
            other.data = one.detach().as_strided(self.slots[second].size, self.slots[second].stride, offset)


def overlapping(slots: dict[str, Slot], held: Any) -> Iterator[tuple[str, str]]:
    """Pairs of names of different tensors that share memory; the first of a pair is the larger."""
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
    """Put tensors in the place of loose ones that have no values."""
    made: dict[LooseTensor, torch.Tensor] = {}
    for place, loose in attributes.items():
        if loose.recorded and not loose.computed:
            if loose not in made:
                made[loose] = loose.of(tensor(loose.slot))
            place.put(model, made[loose])


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


class ComputedTensor(torch.Tensor):
    """A tensor that the builder computed from parameters and keeps. Its values can be read, but no gradient flows.

    Plainly it would flow to the parameters as they were at first. Old weight normalisation leaves such a tensor, and
    replaces it before each call.
    """

    place = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_tensor_classes():
            result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and isinstance(result, torch.Tensor) and func not in _READS:
            place = next((arg.place for arg in args if isinstance(arg, ComputedTensor)), "a tensor")
            raise JobError(
                f"The model uses {place}, which its builder computed from parameters: it would not follow them as they "
                "are trained. Compute it in forward."
            )
        return result.as_subclass(torch.Tensor) if isinstance(result, ComputedTensor) else result


_READS: tuple[Any, ...] = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


def _computed(tensor: torch.Tensor, place: str) -> torch.Tensor:
    made = make_subclass(ComputedTensor, tensor)
    made.place = place
    return made


def draw_up(model: nn.Module, tape: Tape) -> Blueprint:
    """The blueprint of a model that a builder has made, recorded or for real. Its parameters become meta tensors."""
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
    """Tensors of their own, and those that stand for parameters and buffers.

    What autograd has linked to a parameter is taken out of its place: it would hold on to the parameter's old memory.
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
    """A blueprint of a model that exists already: every tensor is a constant."""
    return draw_up(model, Tape(0))


def _view(slot: Slot, owners: list[tuple[str, Slot]]) -> tuple[str, Any, Any, Any, int] | None:
    """The parameter or buffer that a tensor shows a part of, and which part."""
    for name, owner in owners:
        inside = owner.extent.start <= slot.extent.start and slot.extent.stop <= owner.extent.stop
        if inside and slot.dtype == owner.dtype:
            return name, owner.size, slot.size, slot.stride, slot.offset - owner.offset
    return None


def _is_changed(slot: Slot, tensor: torch.Tensor) -> bool:
    layout = is_dtensor(tensor) or tuple(tensor.shape) != slot.size or tensor.stride() != slot.stride
    return layout or tensor.dtype != slot.dtype


def _end(offset: int, slot: Slot) -> int:
    return offset + len(slot.extent) // slot.dtype.itemsize


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else 0
