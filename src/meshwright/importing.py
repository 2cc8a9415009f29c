"""Imports without a search for garbage, of which they make none: PyTorch is a million objects, and they stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 50_000
"""Objects after which the collector looks for garbage in a process that is gone soon; Python's own number is 700."""


@contextmanager
def importing(*, briefly: bool = False) -> Iterator[None]:
    """What is imported in here is not looked through, now or later. `briefly` is for a process that ends soon."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if briefly:
            gc.set_threshold(RARELY)
