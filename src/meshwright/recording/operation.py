"""The entries of a tape: operators, and the positions of their arguments and results in recorded storages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from meshwright.recording.report_as_cpu import change_leaves, leaves_in, tensors_in
from meshwright.torch_private.operators import schema_of


@dataclass(frozen=True)
class Slot:
    """The position and layout of a tensor in a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The real tensor, once its storage is real."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> torch.Tensor:
        """A tensor of the same layout with arbitrary content."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)

    def laid_out(self, result: torch.Tensor) -> torch.Tensor:
        """An operator's result in the layout that was recorded: some meta kernels predict other strides."""
        if (result.stride(), result.storage_offset()) == (self.stride, self.offset):
            return result
        storage = torch.UntypedStorage(self.extent.stop)
        self.on(storage).copy_(result)
        return self.on(storage)

    @property
    def extent(self) -> range:
        """The bytes of the storage from its first to its last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        width = self.dtype.itemsize
        return range(self.offset * width, (self.offset + last + 1) * width) if 0 not in self.size else range(0)

    def overlaps(self, other: Slot) -> bool:
        mine, its = self.extent, other.extent
        return self.storage == other.storage and max(mine.start, its.start) < min(mine.stop, its.stop)


@dataclass(frozen=True)
class TapeOperation:
    """One recorded operator; tensors in `args`, `kwargs` and `outputs` are slots."""

    function: Any
    args: Any
    kwargs: Any
    outputs: tuple[Slot, ...]

    @cached_property
    def random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.function.tags

    @cached_property
    def slots(self) -> list[Slot]:
        return leaves_in(Slot, (self.args, self.kwargs, self.outputs))

    def play(self, live: dict[int, torch.UntypedStorage]) -> None:
        """Run on real storages, and add the storages that the operator makes."""
        results = self.call(lambda slot: slot.on(live[slot.storage]))
        for slot, result in zip(self.outputs, tensors_in(results), strict=True):
            if slot.storage not in live:
                live[slot.storage] = slot.laid_out(result).untyped_storage()

    def call(self, real: Callable[[Slot], torch.Tensor]) -> Any:
        args, kwargs = change_leaves(
            lambda leaf: real(leaf) if isinstance(leaf, Slot) else leaf, (self.args, self.kwargs)
        )
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class SetState:
    """A recorded operator that sets the state of torch's generator."""

    state: torch.Tensor
    tags = (torch.Tag.nondeterministic_seeded,)

    def __call__(self) -> None:
        torch.default_generator.set_state(self.state)


@dataclass(frozen=True)
class Draw:
    """A recorded function that fills a tensor with random numbers, and may read what it has drawn."""

    function: Callable[..., Any]
    tags = (torch.Tag.nondeterministic_seeded,)

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.function(tensor, *args, **kwargs)


def changed_by(func: Any, args: Any, kwargs: dict[str, Any], kind: type = torch.Tensor) -> list[Any]:
    """The tensors (or slots) among the arguments that an operator writes to."""
    positions, names = _written_arguments(func)
    values = [args[place] for place in positions if place < len(args)]
    values += [kwargs[name] for name in names if name in kwargs]
    return leaves_in(kind, values)


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(place for place, _ in written), tuple(name for _, name in written)


def leaves_empty(func: Any, sources_written: list[bool]) -> bool:
    """Whether an operator's results are uninitialised memory."""
    name = schema_of(func).name.removeprefix("aten::")
    if name in _COPIES:
        return not sources_written[-1]
    return name in _EMPTY


_EMPTY = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"),
    *("resize_", "resize_as_"),
}
_COPIES = {"clone", "_to_copy", "copy_"}
"""These copy their last tensor argument."""


@cache
def has_own_layout(func: Any) -> bool:
    """Whether an operator's library decides on the strides of its results, which meta kernels may predict wrongly."""
    name = schema_of(func).name
    return "linalg" in name or name in ("aten::geqrf", "aten::ormqr", "aten::_lu_with_info")


@cache
def gives_numbers(func: Any) -> bool:
    """Whether an operator returns numbers instead of tensors: `item`, `equal`, `allclose`."""
    returns = schema_of(func).returns
    return bool(returns) and not any("Tensor" in str(given.type) for given in returns)


@cache
def takes_device(func: Any) -> bool:
    """Whether an operator is told the device of its result."""
    return any(argument.name == "device" for argument in schema_of(func).arguments)


@cache
def is_certain(func: Any) -> bool:
    """Whether an operator draws no random numbers and changes nothing, so that it may run once more."""
    return torch.Tag.nondeterministic_seeded not in func.tags and not schema_of(func).is_mutable


@cache
def only_draws(func: Any) -> bool:
    """Whether an operator only fills its first argument with random numbers, as `normal_` does.

    Its meta kernel has no effect but is slow: calling it would double the time to record a model.
    """
    tensors = [argument for argument in schema_of(func).arguments if "Tensor" in str(argument.type)]
    drawn = torch.Tag.nondeterministic_seeded in func.tags and schema_of(func).name.endswith("_")
    return drawn and len(tensors) == 1 and tensors[0].name == "self"
