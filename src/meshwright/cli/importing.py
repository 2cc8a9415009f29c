"""Imports of a command that should answer soon."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 50_000
"""Objects after which the collector looks for garbage; Python's own 700 is for processes that stay."""


@contextmanager
def importing() -> Iterator[None]:
    """Imports in here are not looked through for garbage, now or later: PyTorch is a million objects, and stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(RARELY)
