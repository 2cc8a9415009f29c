"""Products of float8 matrices with a scale each (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable

import torch

# `torch.nn.functional.scaled_mm` is public from 2.10 on, but torch.compile and CPUs know only this one.
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
"""`(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum)`; the rows of `a` and the columns of `b` are contiguous, and
all sides are multiples of 16."""
