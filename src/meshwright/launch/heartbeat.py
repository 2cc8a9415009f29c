"""Heartbeat of a rank: a line in a file that its main thread writes after every step.

A rank that hangs writes nothing. Imports no torch.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

PATIENCE = 120.0
"""Seconds beyond its longest step so far that a rank may be silent."""
AT_LEAST = 600.0
"""The minimum before the first step has ended, and while compiling, saving and evaluating, which take longer."""
STARTING, STEPPING, COMPILING, SAVING = "starting", "stepping", "compiling", "saving"
EVALUATING = "evaluating"
DUMP = signal.SIGRTMIN + 7
"""Signal on which a rank dumps its Python stacks, even if its main thread is stuck in C."""
_WIDTH = 128


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat of a rank."""

    doing: str
    step: int
    """Finished steps."""
    longest: float
    """Seconds of the longest step."""
    at: float
    """Time on the monotonic clock, which all processes of the machine share."""
    thread: int
    """Id of the main thread, as in stack dumps."""
    waited: float = 0.0
    """Seconds that the main thread has waited for peers and loaders so far, if that is measured."""

    def limit(self, patience: float) -> float:
        """Seconds of silence after which the rank counts as hanging."""
        usual = self.doing == STEPPING and self.step > 0
        return self.longest + (patience if usual else max(patience, AT_LEAST))

    def line(self) -> str:
        return f"{self.doing} {self.step} {self.longest:.3f} {self.at:.3f} {self.thread} {self.waited:.3f}"

    @classmethod
    def read(cls, path: Path) -> Beat | None:
        try:
            doing, step, longest, at, thread, waited = path.read_text().split()
            numbers = {"longest": float(longest), "at": float(at), "waited": float(waited)}
            return cls(doing=doing, step=int(step), thread=int(thread), **numbers)
        except (OSError, ValueError):
            return None


class Heartbeat:
    """Writes the heartbeats of this process to `path`, if there is one."""

    own: ClassVar[Heartbeat | None] = None

    def __init__(self, path: Path | None = None) -> None:
        self._descriptor = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._main = threading.main_thread().ident or 0
        self._pid = os.getpid()
        self.waited = 0.0
        """Seconds so far, added up by a thread."""
        self.measures_waiting = False
        """Whether there is such a thread."""
        self._beat(STARTING, 0, 0.0, time.monotonic())

    def step(self, number: int) -> None:
        """Step `number` of the run has ended."""
        now = time.monotonic()
        took = now - self.last.at if self.last.doing == STEPPING and self.last.step else 0.0
        self._beat(STEPPING, number, max(self.last.longest, took), now)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Context of an activity that may take longer than a step."""
        before = self.last.doing
        self.begin(what)
        try:
            yield
        finally:
            self.begin(before)

    def begin(self, what: str) -> None:
        self._beat(what, self.last.step, self.last.longest, time.monotonic())

    def _beat(self, doing: str, step: int, longest: float, at: float) -> None:
        self.last = Beat(doing=doing, step=step, longest=longest, at=at, thread=self._main, waited=self.waited)
        if self._descriptor is not None and os.getpid() == self._pid:
            os.pwrite(self._descriptor, self.last.line().ljust(_WIDTH).encode(), 0)


def own_heartbeat() -> Heartbeat:
    """The heartbeat of this process; it writes nothing unless the launcher gave it a file."""
    if Heartbeat.own is None:
        Heartbeat.own = Heartbeat()
    return Heartbeat.own


def beat_while_compiling() -> None:
    """Beat when compiling starts and ends, also when a later step recompiles."""
    from meshwright.torch_private.dynamo import on_compile_end, on_compile_start

    heartbeat = own_heartbeat()
    on_compile_start(lambda *arguments: heartbeat.begin(COMPILING))
    on_compile_end(lambda *arguments: heartbeat.begin(STEPPING))


def dump_on_signal(path: Path) -> IO[str]:
    """Append stacks to a file on the signal `DUMP`; the file must stay open."""
    file = path.open("a")
    faulthandler.register(DUMP, file=file, all_threads=True)
    return file
