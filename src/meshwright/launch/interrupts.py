"""Signals that end the launcher and its ranks at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from meshwright.torch_private.elastic import SignalException

UNUSED = "SIGURG"
"""What torch's agent is told to take instead: one that nobody sends."""


class Interrupts:
    """Raises the signals as torch's agent does, which then ends the ranks that it knows.

    It knows them only when all are started: a signal that comes before would leave them running, so it has to wait.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._starting = False
        self._came: signal.Signals | None = None

    def __enter__(self) -> Interrupts:
        """Outside of the main thread Python takes no handlers."""
        main = threading.current_thread() is threading.main_thread()
        numbers = [signal.Signals[name] for name in self._names] if main else []
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, self._hear) for number in numbers}
        if main:
            self._before[signal.Signals[UNUSED]] = signal.getsignal(signal.Signals[UNUSED])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def after_start(self) -> Iterator[None]:
        """What comes while ranks are started in here is raised at the end."""
        self._starting = True
        try:
            yield
        finally:
            self._starting = False
        if self._came is not None:
            raise _raised(self._came)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._starting:
            raise _raised(signal.Signals(number))
        self._came = signal.Signals(number)


def _raised(number: signal.Signals) -> SignalException:
    return SignalException(f"{number.name} ends the run.", sigval=number)
