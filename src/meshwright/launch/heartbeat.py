"""What a rank does, told to whom watches it: a line in a file, written by its main thread after every step.

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
"""Seconds that a rank may be silent beyond its longest step so far."""
AT_LEAST = 600.0
"""The same before the first step has ended, while compiling and while saving: these take long where steps do not."""
STARTING, STEPPING, COMPILING, SAVING = "starting", "stepping", "compiling", "saving"
DUMP = signal.SIGRTMIN + 7
"""Has a rank write the Python stacks of its threads, also where its main thread never comes back from C."""
_WIDTH = 96


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The last that was heard of a rank."""

    doing: str
    step: int
    """Steps that it has ended."""
    longest: float
    """Seconds of its longest step."""
    at: float
    """By the machine's monotonic clock, which is one for all its processes."""
    thread: int
    """Its main thread, as stacks name it."""

    def limit(self, patience: float) -> float:
        """Seconds after which silence is a fault."""
        usual = self.doing == STEPPING and self.step > 0
        return self.longest + (patience if usual else max(patience, AT_LEAST))

    def line(self) -> str:
        return f"{self.doing} {self.step} {self.longest:.3f} {self.at:.3f} {self.thread}"

    @classmethod
    def read(cls, path: Path) -> Beat | None:
        try:
            doing, step, longest, at, thread = path.read_text().split()
            return cls(doing=doing, step=int(step), longest=float(longest), at=float(at), thread=int(thread))
        except (OSError, ValueError):
            return None


class Heartbeat:
    """The beats of this process. Where nobody watches, they go nowhere."""

    own: ClassVar[Heartbeat | None] = None

    def __init__(self, path: Path | None = None) -> None:
        self._descriptor = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._main = threading.main_thread().ident or 0
        self._pid = os.getpid()
        self.last = Beat(doing=STARTING, step=0, longest=0.0, at=time.monotonic(), thread=self._main)
        self._write()

    def step(self, number: int) -> None:
        """A step has ended, the run's `number`-th."""
        now = time.monotonic()
        took = now - self.last.at if self.last.doing == STEPPING and self.last.step else 0.0
        self._beat(STEPPING, number, max(self.last.longest, took), now)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Something that takes longer than a step."""
        before = self.last.doing
        self._beat(what, self.last.step, self.last.longest)
        try:
            yield
        finally:
            self._beat(before, self.last.step, self.last.longest)

    def begin(self, what: str) -> None:
        self._beat(what, self.last.step, self.last.longest)

    def _beat(self, doing: str, step: int, longest: float, at: float | None = None) -> None:
        now = time.monotonic() if at is None else at
        self.last = Beat(doing=doing, step=step, longest=longest, at=now, thread=self._main)
        self._write()

    def _write(self) -> None:
        if self._descriptor is not None and os.getpid() == self._pid:
            os.pwrite(self._descriptor, self.last.line().ljust(_WIDTH).encode(), 0)


def own_heartbeat() -> Heartbeat:
    """This process's, silent unless somebody watches."""
    if Heartbeat.own is None:
        Heartbeat.own = Heartbeat()
    return Heartbeat.own


def tell_of_compiling() -> None:
    """Have beats say when the model is compiled, also where a later step compiles it anew."""
    from meshwright.torch_private.dynamo import on_compile_end, on_compile_start

    heartbeat = own_heartbeat()
    on_compile_start(lambda *arguments: heartbeat.begin(COMPILING))
    on_compile_end(lambda *arguments: heartbeat.begin(STEPPING))


def dump_on_signal(path: Path) -> IO[str]:
    """Write stacks to a file when `DUMP` comes; the file must stay open."""
    file = path.open("w")
    faulthandler.register(DUMP, file=file, all_threads=True)
    return file
