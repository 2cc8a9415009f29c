"""Process groups as operators name them, and DDP's buckets (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of collective operators."""

FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES
"""Size of DDP's first bucket."""

assign_buckets: Callable[[list[Tensor], list[int]], tuple[list[list[int]], list[int]]]
assign_buckets = dist._compute_bucket_assignment_by_size
"""Groups tensors into DDP's buckets, given a limit for the first bucket and one for the others."""


def group_given_as(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an argument of a collective names or wraps; None for another argument."""
    if isinstance(argument, str):
        return dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[arg-type]  # a str at run time
    if isinstance(argument, Tensor) or type(argument).__name__ not in ("ScriptObject", "FakeScriptObject"):
        return None
    try:
        return dist.ProcessGroup.unbox(getattr(argument, "real_obj", argument))
    except Exception:  # another object: the operator of a reduction
        return None
