"""Count live bytes and the work of every operator while a model runs on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.describe.dtypes import WORDS
from meshwright.describe.flops import ALLOCATIONS, convolution_shape, count_flops, operator_kind, product_shape
from meshwright.describe.recurrent import recurrent_work
from meshwright.recording.report_as_cpu import tensors_in
from meshwright.torch_private.fake_tensors import as_laid_out
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.operators import schema_of
from meshwright.torch_private.tensors import storage_id
from meshwright.tracing.allocator import ROUNDING, round_up
from meshwright.tracing.element_steps import convolution_steps, element_steps
from meshwright.tracing.gradient_sums import GradientSums
from meshwright.tracing.workspaces import layout_copies, operator_workspaces

LOOK_UPS = ("embedding", "gather", "index_select", "nll_loss_forward", "nll_loss2d_forward")
"""Operators that read a few elements of their first argument."""
FILLS = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "fill_", "zero_", "bernoulli_")
"""Operators that write and read nothing; their first argument tells only the size."""
CHANGES_IN_PLACE = ("scatter_", "scatter_add_", "index_add_", "index_copy_")
"""Operators that change a few elements of their first argument; the last argument has the values."""


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """One operator that ran, at one batch size."""

    name: str
    kind: str
    dtype: str
    flops: float
    bytes: float
    made: float
    """Bytes of its results."""
    shape: tuple[int, ...]
    steps: float = 0.0
    """As in `Kernel.steps`."""
    copied: float = 0.0
    """As in `Kernel.copied`."""


def aligned(low: list[OperatorRun], high: list[OperatorRun]) -> Iterator[tuple[OperatorRun, OperatorRun]]:
    """Pairs of the same operator at two batch sizes.

    If values decide what runs, the two lists differ, as when a mixture calls more experts for more tokens. Then the
    operators of one name and dtype share their work evenly, and there are as many as at the larger size.
    """
    if [run.name for run in low] == [run.name for run in high]:
        yield from zip(low, high, strict=True)
        return
    groups: dict[tuple[str, str], tuple[list[OperatorRun], list[OperatorRun]]] = {}
    for size, runs in enumerate((low, high)):
        for run in runs:
            groups.setdefault((run.name, run.dtype), ([], []))[size].append(run)
    for small, large in groups.values():
        count = len(large) or len(small)
        pair = _share(small or large, count), _share(large or small, count)
        yield from [pair] * count


_SUMS = ("flops", "bytes", "made", "steps", "copied")


def _share(runs: list[OperatorRun], count: int) -> OperatorRun:
    """The mean of operators' work, as if there were `count` of them."""
    sums = {name: sum(getattr(run, name) for run in runs) / count for name in _SUMS}
    shape = tuple(round(sum(sizes) / len(runs)) for sizes in zip(*(run.shape for run in runs), strict=False))
    return replace(runs[0], **sums, shape=shape)


class Meter(TorchDispatchMode):
    """While active, reports every operator to `ran`; `live` counts the bytes of tensors made since then."""

    def __init__(self, ran: Callable[[OperatorRun], None]) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        """The most live bytes since `peak` was last reset to `live`."""
        self._ran = ran
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._gradient_sums = GradientSums()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = as_laid_out(func, args, func(*args, **kwargs))
        given, made = strided_in((args, kwargs)), strided_in(result)
        if self._gradient_sums.in_place(func, args):
            self._take_over(args[0], result)
        for leaf in made:
            self._hold(leaf)
        for held in operator_workspaces(func, args, result, sums=False):
            self.peak = max(self.peak, self.live + sum(held))
        if not is_view(func, given, made):
            self._ran(operator_run(func, args, kwargs, result, given, made))
        return result

    def known(self, tensors: list[torch.Tensor]) -> None:
        """Do not count the bytes of these tensors."""
        for tensor in tensors:
            self._note(tensor.untyped_storage(), 0)

    def watch(self, tensor: torch.Tensor) -> Callable[[], Any] | None:
        """A function that returns None once the tensor's memory is freed; None if the memory was not made here."""
        return self._storages.get(storage_id(tensor.untyped_storage()))

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage_id(storage) in self._storages:
            return
        size = round_up(storage.nbytes(), ROUNDING)
        self._note(storage, size)
        self._gradient_sums.note(storage_id(storage))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _take_over(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Let a new tensor have the memory of an old one, which nothing reads any more."""
        before, after = old.untyped_storage(), new.untyped_storage()
        self._note(after, round_up(before.nbytes(), ROUNDING))
        self._note(before, 0)
        self._gradient_sums.note(storage_id(after))

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage_id(storage)
        self._storages[key] = weakref.ref(storage, lambda ref: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        self._storages.pop(key, None)
        self._gradient_sums.forget(key)
        self.live -= size


def strided_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results that have one storage; sparse ones are not counted."""
    return [tensor for tensor in tensors_in(tree) if tensor.layout == torch.strided]


def is_view(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether an operator does no work: it returns its input's memory and does not write to it."""
    if func is torch.ops.aten.lift_fresh.default:
        return True  # it wraps a tensor made of numbers; only for fake tensors the storage changes
    if not made or schema_of(func).is_mutable:
        return not schema_of(func).is_mutable
    inputs = {storage_id(leaf.untyped_storage()) for leaf in given}
    return bool(inputs) and all(storage_id(leaf.untyped_storage()) in inputs for leaf in made)


def operator_run(
    func: Any, args: Any, kwargs: Any, result: Any, given: list[torch.Tensor], made: list[torch.Tensor]
) -> OperatorRun:
    """The work of an operator with these arguments and results."""
    name = func.overloadpacket.__name__
    flops = count_flops(func, args, kwargs, result)
    if _is_causal(func, args, kwargs):
        flops *= _below_diagonal(given)  # the kernel skips what is above it, but the registry counts it
    kind, recurrent = operator_kind(func), recurrent_work(func, args)
    products = product_shape(func, args) or convolution_shape(func, args, made)
    # A product's dtype is that of its factors: fp8's give results in bf16.
    seen = given if kind == "matmul" else [*given, *made]
    largest = max(seen, key=lambda leaf: leaf.numel() * leaf.is_floating_point(), default=None)
    return OperatorRun(
        name=name,
        kind=kind,
        dtype=WORDS.get(largest.dtype if largest is not None else torch.float32, "fp32"),
        flops=recurrent.flops if recurrent else flops,
        bytes=float(_touched(name, given, made)) + (recurrent.reread if recurrent else 0.0),
        made=float(sum(_bytes(leaf) for leaf in made)),
        shape=recurrent.shape if recurrent else _attention_shape(name, given) or products,
        steps=_steps(func, args, kind, given, made, products),
        copied=float(layout_copies(func, args, result)),
    )


def _steps(
    func: Any, args: Any, kind: str, given: list[torch.Tensor], made: list[torch.Tensor], shape: tuple[int, ...]
) -> float:
    if kind == "convolution":
        return convolution_steps(shape, given, sum(args[10][:2]) if "backward" in func.overloadpacket.__name__ else 0)
    return element_steps(func, args, given, made) if kind == "other" else 0.0


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in schema_of(func).arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(kwargs.get("is_causal", place < len(args) and args[place]))


def _below_diagonal(given: list[torch.Tensor]) -> float:
    """The share of scores that a causal kernel computes: half, or more for the last queries of a longer sequence."""
    queries, keys = given[0].shape[-2], given[1].shape[-2]
    return 1 - queries / (2 * keys) if queries < keys else 0.5


def _touched(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    """Bytes read and written. Of a table, only the elements that are looked up or changed are."""
    written, sizes = sum(_bytes(leaf) for leaf in made), [_bytes(leaf) for leaf in given]
    if name in ALLOCATIONS:
        return 0
    if name in FILLS:
        return written
    if name == "copy_":  # it does not read what it writes over
        return written + sizes[-1]
    if name in LOOK_UPS:
        return 2 * written + sum(sizes[1:])
    if name in CHANGES_IN_PLACE:
        return 2 * sizes[-1] + sum(sizes[1:])
    if name == "nll_loss_backward":  # it reads the labels, and not what it is the gradient of
        return written + sum(sizes) - max(sizes)
    return written + sum(_bytes(leaf) for leaf in {id(leaf): leaf for leaf in given}.values())


def _bytes(tensor: torch.Tensor) -> int:
    # Expanded elements are read from the cache.
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _attention_shape(name: str, given: list[torch.Tensor]) -> tuple[int, ...]:
    """(batch * heads, queries, keys, head width); empty for other operators."""
    keys = 2 if "backward" in name else 1  # after the gradient and the queries
    if "attention" not in name or len(given) <= keys or not given[0].dim() == given[keys].dim() == 4:
        return ()
    batch, heads, queries, width = given[0].shape
    return batch * heads, queries, given[keys].shape[2], width
