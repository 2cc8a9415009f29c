"""How torch functions run on this rank's parts.

A rule takes a function's name and arguments, at least one of them divided, and gives what the function would give on
the whole tensors; or `NotImplemented`, and then the function runs on whole tensors. Rules compute on local tensors
only, so autograd differentiates what was computed, and no operator needs a rule for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

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
    """Every element of the result comes of the elements in its place, with broadcasting."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    first = next(leaf for leaf in tensors if is_divided(leaf, mesh))
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in tensors))
    place = first.dim() - dim_of(first)  # counted from the right, as broadcasting does
    size = first.shape[-place]

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        has_it = leaf.dim() >= place and leaf.shape[-place] == size
        return part(leaf, leaf.dim() - place, mesh) if has_it else shared(leaf, mesh)

    local_args, local_kwargs = tree_map(own, (args, kwargs))
    return divided(func(*local_args, **local_kwargs), len(shape) - place, mesh)


def convert(func: Rule, mesh: DeviceMesh, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Changes the dtype or the memory of one tensor, whose elements and shape stay."""
    if not is_divided(x, mesh):
        return NotImplemented
    args, kwargs = tree_map(lambda leaf: local(leaf) if is_divided(leaf, mesh) else leaf, (args, kwargs))
    own = local(x)
    result = func(own, *args, **kwargs)
    if result.device != own.device:
        return NotImplemented  # parts live on the mesh's device
    return x if result is own else divided(result, dim_of(x), mesh, pieces_of(x))


def make_new(func: Rule, mesh: DeviceMesh, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Makes a new whole tensor and takes dtype and device only from one that is there."""
    args, kwargs = tree_map(lambda leaf: whole(leaf, mesh) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return func(local(x) if is_divided(x, mesh) else x, *args, **kwargs)


def move_dims(func: Rule, mesh: DeviceMesh, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Dims change places, or dims of size 1 come and go; none is cut or merged."""
    expected = func(torch.empty(x.shape, device="meta"), *args, **kwargs).shape
    result = func(local(x), *args, **kwargs)
    found = [dim for dim, size in enumerate(result.shape) if expected[dim : dim + 1] != (size,)]
    return divided(result, found[0], mesh) if len(found) == 1 and len(expected) == result.dim() else NotImplemented


def reshape(func: Rule, mesh: DeviceMesh, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """The same elements in the same order under another shape."""
    if any(isinstance(leaf, torch.dtype) for leaf in tree_leaves((args, kwargs))):
        return NotImplemented  # view(dtype) reads bits anew
    args, kwargs = tree_map(lambda leaf: whole_meta(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    shape = func(whole_meta(x), *args, **kwargs).shape
    dim = _divided_dim(x, shape, mesh)
    return divided(local(x).reshape(_divide(shape, dim, mesh)), dim, mesh) if dim is not None else NotImplemented


def whole_meta(x: Tensor) -> Tensor:
    """A tensor of the whole's shape, without memory."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _divided_dim(x: DTensor, shape: Sequence[int], mesh: DeviceMesh) -> int | None:
    """The dim along which a tensor is divided under another shape.

    Along dim d a tensor is prod(shape[:d]) runs of elements, of which each rank has an even part. Under another shape
    that is a division along the dim with as many runs before it, if its size divides.
    """
    runs = prod(x.shape[: dim_of(x)])
    for dim, size in enumerate(shape):
        if prod(shape[:dim]) == runs and size > 1 and size % mesh.size() == 0:
            return dim
    return None


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
    """Also `chunk` and `split_with_sizes`, whose arguments have other names."""
    if _split_dim(x, args, kwargs) == dim_of(x):
        return NotImplemented
    return tuple(divided(own, dim_of(x), mesh) for own in func(local(x), *args, **kwargs))


def split_pieces(func: Rule, mesh: DeviceMesh, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """A fused tensor comes apart without sending anything, if it is split into just its pieces."""
    dim, pieces = _split_dim(x, args, kwargs), pieces_of(x)
    expected = [own.shape[dim] for own in func(whole_meta(x), *args, **kwargs)]
    if dim != dim_of(x) or expected != [x.shape[dim] // pieces] * pieces:
        return NotImplemented
    return tuple(divided(own, dim, mesh) for own in local(x).chunk(pieces, dim))


def _split_dim(x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    dim: int = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return dim % x.dim()


def reshape_pieces(func: Rule, mesh: DeviceMesh, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """A fused tensor whose pieces get a dim of their own is divided along the next one."""
    shape = func(whole_meta(x), *args, **kwargs).shape
    lead, pieces = tuple(x.shape[:-1]), pieces_of(x)
    fits = dim_of(x) == x.dim() - 1 and tuple(shape[: x.dim()]) == (*lead, pieces) and len(shape) > x.dim()
    if not fits or shape[x.dim()] % mesh.size():
        return NotImplemented
    return divided(local(x).reshape(_divide(shape, x.dim(), mesh)), x.dim(), mesh)


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
    """Numbers, slices, None and an ellipsis, as long as they leave the divided dim whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    simple = all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items)
    if not is_divided(x, mesh) or not simple:
        return NotImplemented
    items = _without_ellipsis(items, x.dim())
    before = _position(items, dim_of(x))
    if not _is_all(items[before], x.shape[dim_of(x)]):
        return NotImplemented
    items[before] = slice(None)
    result_dim = sum(type(item) is not int for item in items[:before])
    return divided(local(x)[tuple(items)], result_dim, mesh)


def _without_ellipsis(items: list[Any], dims: int) -> list[Any]:
    """One item for every dim."""
    missing = [slice(None)] * (dims - sum(item is not None and item is not Ellipsis for item in items))
    if not any(item is Ellipsis for item in items):
        return items + missing
    place = next(number for number, item in enumerate(items) if item is Ellipsis)
    return items[:place] + missing + items[place + 1 :]


def _is_all(item: Any, size: int) -> bool:
    return isinstance(item, slice) and item.indices(size) == (0, size, 1)


def _position(items: list[Any], dim: int) -> int:
    """Where the item for a dim stands; None stands for a new dim."""
    return [number for number, item in enumerate(items) if item is not None][dim]


def concatenate(func: Rule, mesh: DeviceMesh, tensors: Sequence[Tensor], dim: int = 0, **other: Any) -> Any:
    # An empty cache of attention begins with a tensor of no elements, which torch passes over.
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
    """Softmax and the like: each row along a dim by itself."""
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
    """Also RMSNorm. Weights are whole, and each rank has a share of their gradient."""
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


def functions(names: str, *places: Any) -> set[Any]:
    """The functions of these names in torch, torch.Tensor and torch.nn.functional, or in other places."""
    found = (getattr(place, name, None) for name in names.split() for place in places or (torch, Tensor, F))
    return {func for func in found if callable(func)}
