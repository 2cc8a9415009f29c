"""A DTensor's local tensor, and DTensor's shape propagation (PyTorch 2.11 to 2.13).

DTensor is imported inside functions, because importing it takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's part of a DTensor; unlike `to_local` it is not recorded by autograd."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor."""
    tensor._local_tensor = local


def shape_search_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[Any]:
    """Context in which DTensor runs an operator on full-size fake tensors, to find shapes, through `wrap(method)`."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    search = getattr(ShardingPropagator, name, None)
    return nullcontext() if search is None else patch.object(ShardingPropagator, name, wrap(search))


def forget_layouts() -> None:
    """Clear DTensor's caches: it treats meshes of equal sizes as one, even when their groups no longer exist."""
    from torch.distributed.tensor import debug

    for name in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, name, lambda: None)()


def spec_of(tensor: DTensor) -> Any:
    """The mesh, placements and whole shape of a DTensor."""
    return tensor._spec


layout_of: Callable[[DTensor], tuple[Any, Any, Any]] = attrgetter("_spec.mesh", "_spec.placements", "_spec.tensor_meta")
"""A DTensor's mesh and placements, and the shape, strides and dtype of the whole. Copies of a layout share them."""


def make_dtensor(local: Tensor, spec: Any) -> DTensor:
    """A DTensor of a local tensor, outside of autograd and without computing anything about it."""
    from torch.distributed.tensor import DTensor

    own = object.__new__(type(spec))
    own.__dict__.update(spec.__dict__)  # a tenth of what `copy` takes
    return DTensor.__new__(DTensor, local, own, requires_grad=False)  # its __init__ does nothing, in Python
