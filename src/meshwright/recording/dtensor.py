"""Check for DTensors without importing them: the import takes a second, and a plan needs none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    kind = dtensor_type()
    return kind is not None and isinstance(x, kind)


def dtensor_type() -> Any:
    """The class DTensor, or None if it has not been imported: then no DTensor can exist."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
