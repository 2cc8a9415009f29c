"""Progress of long work on a checkpoint; the caller decides how to show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
"""Called with the number of bytes just finished."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Called with a description and the total in bytes; wraps the work."""


@contextmanager
def silent(what: str, total: int) -> Iterator[Advance]:
    """Show nothing."""
    yield lambda size: None
