"""What draws a truncated normal distribution (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import init as _init

truncated_normal: Callable[..., Any] = _init._no_grad_trunc_normal_
"""Fills a tensor; takes it, mean, standard deviation, both bounds, and perhaps a generator.

Since PyTorch 2.13 it draws again until nothing is out of bounds, and so reads what it has drawn.
"""


@contextmanager
def replaced_truncated_normal(function: Callable[..., Any]) -> Iterator[None]:
    """While active, `nn.init.trunc_normal_` calls this function."""
    before = _init._no_grad_trunc_normal_
    _init._no_grad_trunc_normal_ = function
    try:
        yield
    finally:
        _init._no_grad_trunc_normal_ = before
