"""Launch the ranks of one strategy and wait; a result, a failure and a timeout all become an outcome."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from meshwright.errors import MeshwrightError, RankFailed, Refused, one_line
from meshwright.launch.launch import launch
from meshwright.runtime.request import CompareTask

OK, REFUSED, FAILED, KILLED, TIMEOUT, OUT_OF_MEMORY = "ok", "refused", "failed", "killed", "timeout", "out of memory"
WORKER = "meshwright.compare.rank"
EXHAUSTED = ("OutOfMemoryError", "MemoryError", "out of memory", "not enough memory", "allocate memory")
"""Words in the errors of CUDA's, Python's, torch's and the system's allocators."""


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How one launch ended."""

    status: str
    reason: str = ""
    """Empty if it went well."""
    measured: dict[str, Any] | None = None
    """What the ranks measured; None if they failed."""


def start(task: CompareTask, ranks: int, *, timeout: float, worker: str = WORKER) -> LaunchOutcome:
    """Run a task in new ranks. Raises only the user's interrupt."""
    results: list[Any] = []
    alarm = _Alarm(timeout)
    try:
        with alarm.set():
            launch(task, ranks, results=results, worker=worker)
    except KeyboardInterrupt:
        if not alarm.rang:
            raise
        return LaunchOutcome(status=TIMEOUT, reason=f"Its ranks had not ended after {timeout:g} s and were stopped.")
    except RankFailed as failure:
        return LaunchOutcome(status=_status(failure), reason=_first_line(failure))
    except MeshwrightError as error:
        return LaunchOutcome(status=REFUSED if isinstance(error, Refused) else FAILED, reason=_first_line(error))
    except OSError as error:
        return LaunchOutcome(status=FAILED, reason=f"Its ranks could not be started: {one_line(error)}")
    if not results:
        return LaunchOutcome(status=FAILED, reason="Its ranks ended without reporting a measurement.")
    return LaunchOutcome(status=OK, measured=results[-1])


def _status(failure: RankFailed) -> str:
    if failure.signal is not None:
        return KILLED
    return OUT_OF_MEMORY if any(word in str(failure) for word in EXHAUSTED) else FAILED


def _first_line(error: MeshwrightError) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class _Alarm:
    """Ends a launch that takes too long, as Ctrl-C would. Works only in the main thread, where Python has alarms."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.rang = False

    @contextmanager
    def set(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        """Call the launcher's handler, which waits until all ranks are started. Without one, the launch is over."""
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler):
            self.rang = True
            handler(signal.SIGTERM, frame)
