"""Make real tensors for a traced operator, with values that it accepts: indices within bounds, finite numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.recording.report_as_cpu import change_leaves, leaves_in
from meshwright.tracing.operator_calls import OperatorCall, TensorLayout

_PRODUCTS = ("matmul", "attention", "convolution")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class CannotRun(Exception):
    """An operator cannot be run by itself."""


def make_runnable(call: OperatorCall, device: torch.device, calls: Mapping[str, OperatorCall]) -> Callable[[], Any]:
    """A function that runs the operator once, on tensors that are made now.

    Bytes that another of the `calls` makes have a meaning, and wrong ones may crash; so that one is run first.
    """
    if leaves_in(torch.Tensor, (call.args, call.kwargs)):
        raise CannotRun("it takes a tensor without strides")
    bound, made = _bound(call), dict[int, torch.Tensor]()

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return device
        if not isinstance(leaf, TensorLayout):
            return leaf
        if leaf.number not in made and leaf.origin is not None:
            made[leaf.number] = _from_origin(leaf.origin, device, calls)
        if leaf.number not in made:
            made[leaf.number] = _tensor(leaf, device, bound, spread=call.run.kind in _PRODUCTS)
        return made[leaf.number]

    args, kwargs = change_leaves(real, (call.args, call.kwargs))
    operator = call.operator
    return lambda: operator(*args, **kwargs)


def _from_origin(origin: tuple[str, int], device: torch.device, calls: Mapping[str, OperatorCall]) -> torch.Tensor:
    signature, place = origin
    if signature not in calls:
        raise CannotRun(f"it needs what {signature.split('(')[0]} makes")
    results = make_runnable(calls[signature], device, calls)()
    tensor: torch.Tensor = results[place] if isinstance(results, tuple | list) else results
    return tensor


def input_bytes(call: OperatorCall) -> int:
    """Bytes of the operator's inputs and, at most, of its results."""
    layouts = leaves_in(TensorLayout, (call.args, call.kwargs))
    sizes: dict[int, int] = {layout.number: _span(layout) * layout.dtype.itemsize for layout in layouts}
    return sum(sizes.values()) + int(call.run.made)


def _tensor(layout: TensorLayout, device: torch.device, bound: int, *, spread: bool) -> torch.Tensor:
    """A tensor of this layout. `spread`: a product's values, which decide its power, are normally distributed."""
    storage = torch.empty(_span(layout), dtype=layout.dtype, device=device)
    tensor = storage.as_strided(layout.shape, layout.stride)
    if device.type == "meta":
        return tensor
    if layout.dtype in _INTEGERS:
        storage.random_(0, max(1, min(bound, torch.iinfo(layout.dtype).max)))
    elif layout.dtype == torch.bool:
        storage.bernoulli_(0.5)
    elif layout.dtype.is_floating_point and layout.dtype.itemsize > 1:
        # Positive numbers have roots and logarithms; what is smaller could become denormal, which CPUs compute slowly.
        storage.normal_() if spread else storage.uniform_(0.1, 1.0)
    elif layout.dtype.is_complex:
        storage.normal_()
    else:  # bytes of fp8, uint64 seeds
        storage.view(torch.uint8).random_(0, 8)
    return tensor


def _span(layout: TensorLayout) -> int:
    """Elements from the first to the last one in memory."""
    if 0 in layout.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))


def _bound(call: OperatorCall) -> int:
    """What integers among the arguments must be below: the size that they index."""
    name, args = call.run.name, call.args
    if name in _INDEXED:
        return _INDEXED[name](args)
    sizes = [
        min(layout.shape, default=1)
        for layout in leaves_in(TensorLayout, (args, call.kwargs))
        if layout.dtype.is_floating_point
    ]
    return min(sizes, default=2)


def _rows(args: Any) -> int:
    return int(args[0].shape[0])


def _along_dim(args: Any) -> int:
    return int(args[0].shape[args[1]]) if args[0].shape else 1


def _smallest_indexed(args: Any) -> int:
    indexed = [size for size, index in zip(args[0].shape, args[1], strict=False) if index is not None]
    return int(min(indexed, default=1))


_INDEXED: dict[str, Callable[[Any], int]] = {
    "embedding": _rows,
    "embedding_dense_backward": lambda args: int(args[2]),
    "nll_loss_forward": lambda args: int(args[0].shape[-1]),
    "nll_loss_backward": lambda args: int(args[1].shape[-1]),
    "nll_loss2d_forward": lambda args: int(args[0].shape[1]),
    "nll_loss2d_backward": lambda args: int(args[1].shape[1]),
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_select"), _along_dim),
    **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_"), _along_dim),
    **dict.fromkeys(("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"), _smallest_indexed),
}
"""Operators whose integers are indices."""
