"""Make real tensors for a traced operator, with values that it accepts: indices within bounds, finite numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.probe.attention_run import attention_run
from meshwright.recording.report_as_cpu import change_leaves, leaves_in
from meshwright.torch_private.operators import schema_of
from meshwright.tracing.operator_calls import OperatorCall, TensorLayout

_PRODUCTS = ("matmul", "attention", "convolution", "recurrent")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


Fill = Callable[[TensorLayout, torch.Tensor], None]


class CannotRun(Exception):
    """An operator cannot be run by itself."""


def make_runnable(call: OperatorCall, device: torch.device, calls: Mapping[str, OperatorCall]) -> Callable[[], Any]:
    """A function that runs the operator once, on tensors that are made now.

    Bytes that another of the `calls` makes have a meaning, and wrong ones may crash; so that one is run first.
    """
    if leaves_in(torch.Tensor, (call.args, call.kwargs)):
        raise CannotRun("it takes a tensor without strides")
    fill, made = _filler(call), dict[int, torch.Tensor]()

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return device
        if not isinstance(leaf, TensorLayout):
            return leaf
        if leaf.number not in made and leaf.origin is not None:
            made[leaf.number] = _from_origin(leaf.origin, device, calls)
        if leaf.number not in made:
            made[leaf.number] = _tensor(leaf, device, fill)
        return made[leaf.number]

    args, kwargs = change_leaves(real, (call.args, call.kwargs))
    operator = call.operator
    if device.type == "cuda" and torch.is_grad_enabled() and (run := attention_run(operator, args, kwargs)):
        return run
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


def _tensor(layout: TensorLayout, device: torch.device, fill: Fill) -> torch.Tensor:
    storage = torch.empty(_span(layout), dtype=layout.dtype, device=device)
    if device.type != "meta":
        fill(layout, storage)
    return storage.as_strided(layout.shape, layout.stride)


def _span(layout: TensorLayout) -> int:
    """Elements from the first to the last one in memory."""
    if 0 in layout.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))


def _filler(call: OperatorCall) -> Fill:
    """Writes values to the storage of each argument. Indices are spread over what they index, as in real data."""
    name, args = call.run.name, call.args
    offsets = {place.number: _Spaced(total, first) for place, total, first in _offsets(call)}
    bounds = {index.number: size for index, size in _indices(name, args)}
    others, spread = _least_size(call), call.run.kind in _PRODUCTS
    row = _dim(args) if name in _BY_ROWS else None

    places = args[name.endswith("_backward") + 1] if name in _SAMPLERS else None
    pooled = _POOLED.get(name)

    def fill(layout: TensorLayout, storage: torch.Tensor) -> None:
        if layout is places:
            _fill_raster(storage.as_strided(layout.shape, layout.stride))
        elif pooled and layout is args[-1]:
            _fill_windows(storage.as_strided(layout.shape, layout.stride), args[1].shape[-pooled:])
        elif layout.dtype not in _INTEGERS:
            _fill_numbers(storage, spread=spread)
        elif layout.number in offsets:
            offsets[layout.number].fill(storage)
        else:
            bound = max(1, min(bounds.get(layout.number, others), torch.iinfo(layout.dtype).max))
            storage.random_(0, bound)
            if row is not None and layout.number in bounds and layout.shape:
                _make_runs(storage.as_strided(layout.shape, layout.stride), row, bound)

    return fill


def _fill_numbers(storage: torch.Tensor, *, spread: bool) -> None:
    """`spread`: a product's values, which decide its power, are normally distributed."""
    if storage.dtype == torch.bool:
        storage.bernoulli_(0.5)
    elif storage.dtype.is_floating_point and storage.dtype.itemsize > 1:
        # Positive numbers have roots and logarithms; what is smaller could become denormal, which CPUs compute slowly.
        storage.normal_() if spread else storage.uniform_(0.1, 1.0)
    elif storage.dtype.is_complex:
        storage.normal_()
    else:  # bytes of fp8, uint64 seeds
        storage.view(torch.uint8).random_(0, 8)


def _fill_raster(grid: torch.Tensor) -> None:
    """Let each map of places run through a square, or a cube, line by line: neighbours are sampled near each other."""
    count, dims = grid[0, ..., 0].numel(), grid.shape[-1]
    side = max(2, round(count ** (1 / dims)))
    order = torch.arange(count, device=grid.device).view(grid.shape[1:-1])
    for dim in range(dims):
        line = order // side**dim
        grid[..., dim] = ((line if dim == dims - 1 else line % side) * (2 / side) - 1).clamp(max=1)


def _fill_windows(index: torch.Tensor, plane: tuple[int, ...]) -> None:
    """Let each window of a pooled plane have its maximum at its beginning."""
    made = torch.zeros((), dtype=torch.int64, device=index.device)
    for size, windows in zip(plane, index.shape[-len(plane) :], strict=True):
        made = made[..., None] * size + torch.arange(windows, device=index.device) * size // windows
    index.copy_(made.expand_as(index))


def _make_runs(index: torch.Tensor, dim: int, bound: int) -> None:
    """Let a row's indices count on from its first one: models gather neighbours, such as relative positions.

    Expanded dims are written once.
    """
    for place, stride in enumerate(index.stride()):
        index = index.narrow(place, 0, 1) if stride == 0 else index
    sizes = [1] * index.dim()
    sizes[dim] = index.shape[dim]
    counts = torch.arange(index.shape[dim], device=index.device).view(sizes)
    index.copy_((index.narrow(dim, 0, 1).to(torch.int64) + counts) % bound)


@dataclass(frozen=True)
class _Spaced:
    """Ends of equally large groups of `total` rows, or their beginnings: such offsets must not decrease."""

    total: int
    begins: bool

    def fill(self, storage: torch.Tensor) -> None:
        groups = storage.numel()
        places = torch.arange(groups, device=storage.device) + (not self.begins)
        storage.copy_(places * self.total // max(1, groups))


def _offsets(call: OperatorCall) -> list[tuple[TensorLayout, int, bool]]:
    """Arguments that are offsets of groups: what they divide, and whether they are beginnings."""
    name, args = call.run.name, call.args
    if name in _BAGS:
        return [(args[2], int(args[1].shape[0]), True)]
    if name not in ("_grouped_mm", "_scaled_grouped_mm"):
        return []
    names = [argument.name for argument in schema_of(call.operator).arguments]
    offsets = (dict(zip(names, args, strict=False)) | call.kwargs).get("offs")
    return [(offsets, _grouped_size(*args[:2]), False)] if isinstance(offsets, TensorLayout) else []


def _grouped_size(left: TensorLayout, right: TensorLayout) -> int:
    """What groups of a product divide: the rows, the columns, or the inner dim."""
    if len(left.shape) == len(right.shape):
        return left.shape[-1]
    return left.shape[0] if len(left.shape) == 2 else right.shape[-1]


def _indices(name: str, args: Any) -> list[tuple[TensorLayout, int]]:
    """Arguments that are indices, and the size that each indexes."""
    if name in _BY_PLACE:
        return [(index, size) for index, size in _by_place(args[0].shape, args[1]) if index.dtype in _INTEGERS]
    if name not in _INDEXED:
        return []
    size = _INDEXED[name](args)
    return [(layout, size) for layout in leaves_in(TensorLayout, args) if layout.dtype in _INTEGERS]


def _by_place(shape: tuple[int, ...], indices: Any) -> Iterator[tuple[TensorLayout, int]]:
    """Each index of `x[i, j]` and the size of its dim. A mask takes as many dims as it has."""
    dim = 0
    for index in indices:
        if index is not None and dim < len(shape):
            yield index, int(shape[dim])
        dim += len(index.shape) if index is not None and index.dtype == torch.bool else 1


def _least_size(call: OperatorCall) -> int:
    """What other integers are below: the least size among the arguments."""
    sizes = [
        min(layout.shape, default=1)
        for layout in leaves_in(TensorLayout, (call.args, call.kwargs))
        if layout.dtype.is_floating_point
    ]
    return min(sizes, default=2)


def _dim(args: Any) -> int:
    return int(args[1]) % max(1, len(args[0].shape))


def _along_dim(args: Any) -> int:
    return int(args[0].shape[args[1]]) if args[0].shape else 1


_BAGS = frozenset(("_embedding_bag", "_embedding_bag_forward_only"))
_SAMPLERS = ("grid_sampler_2d", "grid_sampler_3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward")
_POOLED = {f"max_pool{dims}d_with_indices_backward": dims for dims in (2, 3)}
"""Gradients of pooling, by the dims of a plane. Their last argument is where each window's maximum is."""
_BY_ROWS = frozenset(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_"))
_BY_PLACE = frozenset(("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"))
_INDEXED: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(("embedding", *_BAGS), lambda args: int(args[0].shape[0])),
    "embedding_dense_backward": lambda args: int(args[2]),
    "nll_loss_forward": lambda args: int(args[0].shape[-1]),
    "nll_loss_backward": lambda args: int(args[1].shape[-1]),
    "nll_loss2d_forward": lambda args: int(args[0].shape[1]),
    "nll_loss2d_backward": lambda args: int(args[1].shape[1]),
    **dict.fromkeys((*_BY_ROWS, "index_select"), _along_dim),
    **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_"), _along_dim),
}
"""Operators whose integers are indices, and the size that they index."""
