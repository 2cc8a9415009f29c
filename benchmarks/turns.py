"""Turns of processes on one machine: several prepare side by side, and one is timed while all others wait.

A host that other processes keep busy runs Python up to twice as slowly, so nothing runs beside what is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Turns:
    """Shared by processes that were forked from one another."""

    def __init__(self, context: Any, count: int, on_device: int = 1) -> None:
        """At most `count` prepare at once, and `on_device` hold memory of a device."""
        self._count, self._places, self._door = count, context.Semaphore(count), context.Lock()
        self._on_device = context.Semaphore(on_device)

    def on_device(self) -> AbstractContextManager[Any]:
        """Hold memory of the device, from the first step beside others until all is timed."""
        return self._on_device  # type: ignore[no-any-return]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run beside others that prepare."""
        with self._door:
            self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for all others to finish, and keep them from starting."""
        with self._door:
            for _ in range(self._count):
                self._places.acquire()
            try:
                yield
            finally:
                for _ in range(self._count):
                    self._places.release()
