"""Whether something is a DTensor, without importing them: that takes PyTorch a second, and a plan needs none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Where nobody has imported DTensor yet, nothing is one."""
    kind = dtensor_type()
    return kind is not None and isinstance(x, kind)


def dtensor_type() -> Any:
    """The class, or None where nobody has imported it yet."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
