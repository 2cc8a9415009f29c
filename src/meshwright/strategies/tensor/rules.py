"""Rules that run torch functions on this rank's parts.

A rule takes a function and its arguments, at least one of them divided, and returns what the function would return for
whole tensors; or `NotImplemented`, and then the function runs on whole tensors. Rules compute with local tensors only,
so autograd differentiates them, and no operator needs a rule for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.strategies.mesh_axis import divides
from meshwright.strategies.tensor.layout import (
    add_up,
    dim_of,
    divided,
    is_divided,
    local,
    part,
    pieces_of,
    shared,
    whole,
)
from meshwright.torch_private.trees import tree_leaves, tree_map

Rule = Callable[..., Any]
"""(function, mesh, *args, **kwargs) -> the function's result, or NotImplemented."""


def elementwise(func: Rule, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """Functions whose result at a position depends only on the inputs at that position, with broadcasting."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    first = next(leaf for leaf in tensors if is_divided(leaf, mesh))
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in tensors))
    place = first.dim() - dim_of(first)  # counted from the right, as broadcasting does
    size = first.shape[-place]

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        has_dim = leaf.dim() >= place and leaf.shape[-place] == size
        return part(leaf, leaf.dim() - place, mesh) if has_dim else shared(leaf, mesh)

    local_args, local_kwargs = tree_map(own, (args, kwargs))
    return divided(func(*local_args, **local_kwargs), len(shape) - place, mesh)


def convert(func: Rule, mesh: DeviceMesh, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that change the dtype or memory of a tensor, but not its elements or shape."""
    if not is_divided(x, mesh):
        return NotImplemented
    args, kwargs = tree_map(lambda leaf: local(leaf) if is_divided(leaf, mesh) else leaf, (args, kwargs))
    own = local(x)
    result = func(own, *args, **kwargs)
    if result.device != own.device:
        return NotImplemented  # parts live on the mesh's device
    return x if result is own else divided(result, dim_of(x), mesh, pieces_of(x))


def make_new(func: Rule, mesh: DeviceMesh, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that make a new whole tensor with the dtype and device of another."""
    args, kwargs = tree_map(lambda leaf: whole(leaf, mesh) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return func(local(x) if is_divided(x, mesh) else x, *args, **kwargs)


def move_dims(func: Rule, mesh: DeviceMesh, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that reorder dims, or add and remove dims of size 1, without splitting or merging any."""
    expected = func(torch.empty(x.shape, device="meta"), *args, **kwargs).shape
    result = func(local(x), *args, **kwargs)
    found = [dim for dim, size in enumerate(result.shape) if expected[dim : dim + 1] != (size,)]
    return divided(result, found[0], mesh) if len(found) == 1 and len(expected) == result.dim() else NotImplemented


def reshape(func: Rule, mesh: DeviceMesh, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that keep the elements in order under another shape.

    (batch, tokens) may become one dim of a fused tensor, as before a loss, but for `without_fusing`.
    """
    return _reshaped(func, mesh, x, args, kwargs, fuses=_fuses.get())


_fuses: ContextVar[bool] = ContextVar("fuses", default=True)


@contextmanager
def without_fusing() -> Iterator[None]:
    """Region for blocks, where several functions would read a fused tensor, and most of them whole; and for an axis
    that divides the tokens further."""
    token = _fuses.set(False)
    try:
        yield
    finally:
        _fuses.reset(token)


def reshape_rows(func: Rule, mesh: DeviceMesh, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """`reshape` that fuses wherever it can."""
    return _reshaped(func, mesh, x, args, kwargs, fuses=True)


def _reshaped(func: Rule, mesh: DeviceMesh, x: DTensor, args: Any, kwargs: Any, *, fuses: bool) -> Any:
    if any(isinstance(leaf, torch.dtype) for leaf in tree_leaves((args, kwargs))):
        return NotImplemented  # view(dtype) reinterprets bits
    args, kwargs = tree_map(lambda leaf: whole_meta(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    shape = func(whole_meta(x), *args, **kwargs).shape
    for dim, pieces in _divided_dims(x, shape, mesh):
        if pieces == 1 or fuses:
            return divided(local(x).reshape(_divide(shape, dim, mesh)), dim, mesh, pieces)
    return NotImplemented


def whole_meta(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _divided_dims(x: DTensor, shape: Sequence[int], mesh: DeviceMesh) -> Iterator[tuple[int, int]]:
    """Dims along which a tensor is divided after a reshape, with their numbers of pieces, the fewest first.

    A tensor divided along dim d is prod(shape[:d]) runs of elements, and each rank has an even part of every run. After
    a reshape, the divided dim is the one with the same number of runs before it, if its size divides. A dim with fewer
    before it holds several runs: its pieces.
    """
    runs = prod(x.shape[: dim_of(x)]) * pieces_of(x)
    for dim, size in reversed(list(enumerate(shape))):
        pieces, over = divmod(runs, prod(shape[:dim])) if size > 1 else (0, 0)
        if pieces and not over and size % pieces == 0 and divides(size // pieces, mesh):
            yield dim, pieces


def _divide(shape: Sequence[int], dim: int, mesh: DeviceMesh) -> list[int]:
    return [size // mesh.size() if place == dim else size for place, size in enumerate(shape)]


def expand(func: Rule, mesh: DeviceMesh, x: DTensor, *sizes: Any) -> Any:
    wanted = list(_flat(sizes))
    place = x.dim() - dim_of(x)
    if wanted[-place] not in (-1, x.shape[-place]):
        return NotImplemented
    wanted[-place] = -1
    return divided(local(x).expand(wanted), len(wanted) - place, mesh)


def expand_as(func: Rule, mesh: DeviceMesh, x: Tensor, other: Tensor) -> Any:
    return expand(func, mesh, x, *other.shape) if is_divided(x, mesh) else x.expand(other.shape)


def repeat(func: Rule, mesh: DeviceMesh, x: DTensor, *sizes: Any) -> Any:
    times = list(_flat(sizes))
    place = x.dim() - dim_of(x)
    return divided(local(x).repeat(times), len(times) - place, mesh) if times[-place] == 1 else NotImplemented


def repeat_interleave(func: Rule, mesh: DeviceMesh, x: Tensor, repeats: Any, dim: int | None = None) -> Any:
    if dim is None or not isinstance(repeats, int) or not is_divided(x, mesh):
        return NotImplemented
    return divided(local(x).repeat_interleave(repeats, dim), dim_of(x), mesh)


def split(func: Rule, mesh: DeviceMesh, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """`split`, `chunk` and `split_with_sizes`, whose first arguments have different names."""
    if _split_dim(x, args, kwargs) == dim_of(x):
        return NotImplemented
    return tuple(divided(own, dim_of(x), mesh) for own in func(local(x), *args, **kwargs))


def split_pieces(func: Rule, mesh: DeviceMesh, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Splitting a fused tensor into its pieces, which sends nothing."""
    dim, pieces = _split_dim(x, args, kwargs), pieces_of(x)
    expected = [own.shape[dim] for own in func(whole_meta(x), *args, **kwargs)]
    if dim != dim_of(x) or expected != [x.shape[dim] // pieces] * pieces:
        return NotImplemented
    return tuple(divided(own, dim, mesh) for own in local(x).chunk(pieces, dim))


def get_piece(func: Rule, mesh: DeviceMesh, x: DTensor, index: Any) -> Any:
    """A slice of a fused tensor that is one of its pieces, which sends nothing."""
    items = _without_ellipsis(list(index) if isinstance(index, tuple) else [index], x.dim())
    if len(items) != x.dim() or any(type(item) is not slice for item in items):
        return NotImplemented
    spans = [item.indices(size) for item, size in zip(items, x.shape, strict=True)]
    first, last, step = spans.pop(dim_of(x))
    others = [size for dim, size in enumerate(x.shape) if dim != dim_of(x)]
    size = x.shape[dim_of(x)] // pieces_of(x)
    if spans != [(0, other, 1) for other in others] or first % size or (last - first, step) != (size, 1):
        return NotImplemented
    return divided(local(x).chunk(pieces_of(x), dim_of(x))[first // size], dim_of(x), mesh)


def narrow_piece(func: Rule, mesh: DeviceMesh, x: DTensor, dim: int, start: int, length: int) -> Any:
    index = [slice(None)] * x.dim()
    index[dim] = slice(start, start + length)
    return get_piece(func, mesh, x, tuple(index))


def _split_dim(x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    dim: int = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return dim % x.dim()


def unbind(func: Rule, mesh: DeviceMesh, x: DTensor, dim: int = 0) -> Any:
    dim %= x.dim()
    if dim == dim_of(x):
        return NotImplemented
    return tuple(divided(own, dim_of(x) - (dim < dim_of(x)), mesh) for own in local(x).unbind(dim))


def select(func: Rule, mesh: DeviceMesh, x: DTensor, dim: int, index: int) -> Any:
    dim %= x.dim()
    if dim == dim_of(x):
        return NotImplemented
    return divided(local(x).select(dim, index), dim_of(x) - (dim < dim_of(x)), mesh)


def narrow(func: Rule, mesh: DeviceMesh, x: DTensor, dim: int, start: int, length: int) -> Any:
    if dim % x.dim() == dim_of(x):
        return NotImplemented
    return divided(local(x).narrow(dim, start, length), dim_of(x), mesh)


def get_item(func: Rule, mesh: DeviceMesh, x: Tensor, index: Any) -> Any:
    """Indexing with numbers, slices, None and an ellipsis that leaves the divided dim whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    simple = all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items)
    if not is_divided(x, mesh) or not simple:
        return NotImplemented
    items, size = _without_ellipsis(items, x.dim()), x.shape[dim_of(x)]
    place = [number for number, item in enumerate(items) if item is not None][dim_of(x)]  # None adds a new dim
    if not isinstance(items[place], slice) or items[place].indices(size) != (0, size, 1):
        return NotImplemented
    items[place] = slice(None)
    return divided(local(x)[tuple(items)], sum(type(item) is not int for item in items[:place]), mesh)


def _without_ellipsis(items: list[Any], dims: int) -> list[Any]:
    """Replace an ellipsis, so that every dim has an item."""
    missing = [slice(None)] * (dims - sum(item is not None and item is not Ellipsis for item in items))
    if not any(item is Ellipsis for item in items):
        return items + missing
    place = next(number for number, item in enumerate(items) if item is Ellipsis)
    return items[:place] + missing + items[place + 1 :]


def concatenate(func: Rule, mesh: DeviceMesh, tensors: Sequence[Tensor], dim: int = 0, **other: Any) -> Any:
    # torch skips empty tensors, with which an attention cache begins.
    tensors = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)]
    first = next(tensor for tensor in tensors if is_divided(tensor, mesh))
    own = dim_of(first)
    if len(tensors) == 1 and not other:
        return divided(local(first).clone(), own, mesh)
    if other or dim % tensors[0].dim() == own:
        return NotImplemented
    return divided(torch.cat([part(tensor, own, mesh) for tensor in tensors], dim), own, mesh)


def stack(func: Rule, mesh: DeviceMesh, tensors: Sequence[Tensor], dim: int = 0, **other: Any) -> Any:
    own = dim_of(next(tensor for tensor in tensors if is_divided(tensor, mesh)))
    if other:
        return NotImplemented
    after = dim % (tensors[0].dim() + 1) <= own
    return divided(torch.stack([part(tensor, own, mesh) for tensor in tensors], dim), own + after, mesh)


def along_a_dim(func: Rule, mesh: DeviceMesh, x: DTensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Softmax and similar functions of each row along a dim."""
    if dim is None or dim % x.dim() == dim_of(x):
        return NotImplemented
    return divided(func(local(x), dim, *args, **kwargs), dim_of(x), mesh)


def reduce(func: Rule, mesh: DeviceMesh, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Sums and means over some dims."""
    if not is_divided(x, mesh) or not x.is_floating_point():
        return NotImplemented
    dims = {place % x.dim() for place in _flat((dim,))} if dim is not None else set(range(x.dim()))
    result = func(local(x), sorted(dims), keepdim, **kwargs)
    own = dim_of(x)
    if own not in dims:
        return divided(result, own if keepdim else own - sum(place < own for place in dims), mesh)
    return add_up(result / mesh.size() if func in MEANS else result, mesh)


MEANS = (torch.mean, Tensor.mean)


def layer_norm(
    func: Rule, mesh: DeviceMesh, x: Tensor, normalized_shape: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    """LayerNorm and RMSNorm. Weights are whole, and each rank computes a share of their gradient."""
    if not is_divided(x, mesh) or dim_of(x) >= x.dim() - len(normalized_shape):
        return NotImplemented
    args, kwargs = tree_map(lambda leaf: shared(leaf, mesh) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return divided(func(local(x), normalized_shape, *args, **kwargs), dim_of(x), mesh)


def _flat(values: Iterable[Any]) -> Iterable[int]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def functions(names: str) -> set[Any]:
    """The functions of these names in torch, torch.Tensor and torch.nn.functional."""
    found = (getattr(place, name, None) for name in names.split() for place in (torch, Tensor, F))
    return {func for func in found if callable(func)}
