"""Counts what runs on fake tensors: live bytes, and every operator with its work."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.describe.flops import count_flops
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.operators import schema_of
from meshwright.torch_private.tensors import storage_id
from meshwright.torch_private.trees import tree_leaves

_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "linear")
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Ran:
    """One operator that ran, at one batch size."""

    name: str
    kind: str
    dtype: str
    flops: float
    bytes: float
    made: float
    """Bytes of its results."""
    shape: tuple[int, ...]


class Meter(TorchDispatchMode):
    """While active it tells every operator to `ran`; `live` is the bytes that hang on tensors made meanwhile."""

    def __init__(self, ran: Callable[[Ran], None]) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        """The most bytes since it was last set back to `live`."""
        self._ran = ran
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for leaf in made:
            self._hold(leaf)
        if not _is_view(func, given, made):
            self._ran(_work(func, args, kwargs, result, given, made))
        return result

    def known(self, tensors: list[torch.Tensor]) -> None:
        """Tensors that were there before: their bytes do not count."""
        for tensor in tensors:
            self._note(tensor.untyped_storage(), 0)

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage_id(storage) in self._storages:
            return
        # The caching allocator hands out multiples of 512 bytes.
        size = -(-storage.nbytes() // 512) * 512
        self._note(storage, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage_id(storage)
        self._storages[key] = weakref.ref(storage, lambda ref: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        self._storages.pop(key, None)
        self.live -= size


def _is_view(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether an operator does no work: it gives its input's memory back, and does not write to it."""
    if func is torch.ops.aten.lift_fresh.default:
        return True  # a tensor made of numbers comes in; its memory changes where that of fake tensors is another
    if not made or schema_of(func).is_mutable:
        return not schema_of(func).is_mutable
    inputs = {storage_id(leaf.untyped_storage()) for leaf in given}
    return bool(inputs) and all(storage_id(leaf.untyped_storage()) in inputs for leaf in made)


def _work(func: Any, args: Any, kwargs: Any, result: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> Ran:
    name = func.overloadpacket.__name__
    flops = count_flops(func, args, kwargs, result)
    if _is_causal(func, args, kwargs):
        flops /= 2  # the kernel passes over what lies above the diagonal, and the registry counts it
    largest = max([*given, *made], key=lambda leaf: leaf.numel() * leaf.is_floating_point(), default=None)
    return Ran(
        name=name,
        kind=_kind(name, flops),
        dtype=_DTYPES.get(largest.dtype if largest is not None else torch.float32, "fp32"),
        flops=flops,
        bytes=float(_touched(name, given, made)),
        made=float(sum(_bytes(leaf) for leaf in made)),
        shape=_shape(name, given),
    )


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in schema_of(func).arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(kwargs.get("is_causal", place < len(args) and args[place]))


def _kind(name: str, flops: float) -> str:
    if name in _MATMULS:
        return "matmul"
    if "attention" in name:
        return "attention"
    return "convolution" if "convolution" in name and flops else "other"


def _touched(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    """Bytes read and written. A table that is looked up is read only where it is looked at."""
    written = sum(_bytes(leaf) for leaf in made)
    if name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"):
        return 0
    if name == "embedding":
        return 2 * written
    return written + sum(_bytes(leaf) for leaf in given)


def _bytes(tensor: torch.Tensor) -> int:
    # What is expanded is read from the cache again and again.
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _shape(name: str, given: list[torch.Tensor]) -> tuple[int, ...]:
    if "attention" in name and len(given) > 1 and given[0].dim() == given[1].dim() == 4:
        batch, heads, queries, width = given[0].shape
        return batch * heads, queries, given[1].shape[2], width
    if name not in _MATMULS or len(given) < 2:
        return ()
    left, right = given[-2:]
    if left.dim() == 3 and right.dim() == 3:
        return left.shape[0], left.shape[1], right.shape[2], left.shape[2]
    if left.dim() == 2 and right.dim() == 2:
        return 1, left.shape[0], right.shape[1], left.shape[1]
    return ()
