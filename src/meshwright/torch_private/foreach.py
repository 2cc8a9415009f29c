"""Operators on lists of tensors (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch._utils import _unflatten_dense_tensors
from torch.nn.utils import clip_grad

foreach_mul_ = torch._foreach_mul_
"""Multiply tensors in place by a number or a tensor of one element."""

foreach_norm = torch._foreach_norm
"""The 2-norm of each tensor."""

unflatten = _unflatten_dense_tensors
"""Consecutive parts of a flat tensor with the shapes of others."""

foreach_copy_ = torch._foreach_copy_
"""Copy tensors into others, which may have other dtypes."""


def clipping_by_lists() -> AbstractContextManager[Any]:
    """Context in which clipping by norm uses foreach operators on every device, as it does on GPUs."""
    return patch.object(clip_grad, "_has_foreach_support", lambda tensors, device: True)
