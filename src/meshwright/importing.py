"""Work with the garbage collector off: PyTorch creates a million objects, and they live as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 50_000
"""Allocations between garbage collections in a short-lived process; Python's default is 700."""


@contextmanager
def importing(*, briefly: bool = False) -> Iterator[None]:
    """Exempt everything imported in this block from garbage collection. `briefly` is for short-lived processes."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if briefly:
            gc.set_threshold(RARELY)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch the collector off where a model is traced: it would scan all loaded modules, a tenth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
