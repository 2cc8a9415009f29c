"""How long work on a checkpoint tells how far it is: whoever asks for it says where that is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
"""Told of bytes that are done."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Given what is done and how many bytes that takes, around the work."""


@contextmanager
def silent(what: str, total: int) -> Iterator[Advance]:
    """Shown nowhere."""
    yield lambda size: None
