"""PyTorch's dtypes for the number formats that engines compute in."""

from __future__ import annotations

import torch

from meshwright.facts.precision import BUILT, FORMATS

DTYPES: dict[str, torch.dtype] = {word: getattr(torch, FORMATS[word].torch_name) for word in BUILT}
WORDS = {dtype: word for word, dtype in DTYPES.items()}
LOW = tuple(dtype for word, dtype in DTYPES.items() if FORMATS[word].is_low)
"""Dtypes with fewer bits than fp32."""
HALF = tuple(dtype for dtype in LOW if dtype.itemsize == 2)
"""Dtypes with 16 bits."""
