"""PyTorch's dtypes for the number formats that engines compute in."""

from __future__ import annotations

import torch

from meshwright.facts.precision import FORMATS

DTYPES: dict[str, torch.dtype] = {word: getattr(torch, one.torch_name) for word, one in FORMATS.items()}
"""The compute dtype of each precision."""
FACTORS = {word: tuple(getattr(torch, name) for name in one.factors) for word, one in FORMATS.items()}
"""The dtypes to which each precision rounds factors of large products, if they are others."""
WORDS = {DTYPES[word]: word for word in reversed(FORMATS)} | {d: word for word, own in FACTORS.items() for d in own}
"""The precision that each dtype belongs to: bfloat16 to bf16, although fp8 computes in it, too."""
LOW = tuple(dict.fromkeys(dtype for word, dtype in DTYPES.items() if FORMATS[word].is_low))
"""Dtypes with fewer bits than fp32."""
HALF = tuple(dtype for dtype in LOW if dtype.itemsize == 2)
"""Dtypes with 16 bits."""
