"""The tensor inside a DTensor, and how DTensor finds shapes (PyTorch 2.11 to 2.13).

DTensor itself is imported only where it is needed: that takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_tensor(tensor: DTensor) -> Tensor:
    """What this rank holds of a DTensor; autograd does not see it, as it does `to_local`."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Give a DTensor another local tensor."""
    tensor._local_tensor = local


def shape_search_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[Any]:
    """While active, DTensor tries an operator on whole fake tensors through what `wrap` makes of its method."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    search = getattr(ShardingPropagator, name, None)
    return nullcontext() if search is None else patch.object(ShardingPropagator, name, wrap(search))


def forget_layouts() -> None:
    """Clear DTensor's caches: it takes meshes of equal sizes for the same one, even when their groups are gone."""
    from torch.distributed.tensor import debug

    for name in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, name, lambda: None)()
