"""Signals that end the launcher and its ranks at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from meshwright.torch_private.elastic import SignalException

UNUSED = "SIGURG"
"""The signal that torch's agent handles instead: one that no process sends."""


class Interrupts:
    """Raises signals as torch's agent does, which then ends the ranks that it knows.

    The agent knows its ranks only after all are started. An earlier signal would leave them running, so it is delayed.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._starting = False
        self._delayed: signal.Signals | None = None

    def __enter__(self) -> Interrupts:
        """Set the handlers; Python allows that in the main thread only."""
        main = threading.current_thread() is threading.main_thread()
        numbers = [signal.Signals[name] for name in self._names] if main else []
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, self._handle) for number in numbers}
        if main:
            self._before[signal.Signals[UNUSED]] = signal.getsignal(signal.Signals[UNUSED])
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def after_start(self) -> Iterator[None]:
        """Delay signals that come while ranks are started to the end of the block."""
        self._starting = True
        try:
            yield
        finally:
            self._starting = False
        if self._delayed is not None:
            raise _raised(self._delayed)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._starting:
            raise _raised(signal.Signals(number))
        self._delayed = signal.Signals(number)


def _raised(number: signal.Signals) -> SignalException:
    return SignalException(f"{number.name} ends the run.", sigval=number)
