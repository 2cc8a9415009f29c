"""SIGTERM and SIGUSR1 ask a run to save and stop: schedulers send them some time before they take the machine away.

    with Preemption(grace=30) as preemption:
        for batch in run.batches():
            run.trainer.wish_to_stop = preemption.asked is not None
            if run.step(batch).stop:      # the same on every rank
                break

A rank notices a signal in a thread of its own, also while its main thread waits for a collective. `Forwarding` is the
launcher's part: it hands the signal on to the ranks that it started.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, ClassVar

from meshwright.environment import own_rank
from meshwright.launch.attempt import Attempt, leave, own_attempt
from meshwright.launch.parent_death import end_with_parent

GRACE = 30.0
"""Seconds from the signal to the end that a run is given."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOPPED = 128 + signal.SIGTERM
"""Exit code of a rank that was stopped because a peer failed."""
_NO_SIGNAL = 0  # tells the thread to end
_MARGIN = 5.0  # seconds after the grace time in which ranks may say themselves that they were too slow


class Preemption:
    """Whether this process was asked to stop. Inside another one it is that one: signals come to a process.

    Outside of the main thread, where Python takes no handlers, nobody is ever asked.
    """

    _running: ClassVar[Preemption | None] = None

    def __init__(self, *, grace: float = GRACE) -> None:
        self.grace = grace
        self.asked: str | None = None
        """The signal's name, once one came."""
        self._deadline: float | None = None
        self._attempt = own_attempt()

    def __enter__(self) -> Preemption:
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if Preemption._running is self:
            self._end()

    def begin(self) -> Preemption:
        """Listen, to the end of the process unless this is left as a `with` block."""
        if Preemption._running is not None:
            return Preemption._running
        if threading.current_thread() is not threading.main_thread():
            return self
        Preemption._running = self
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        # Python's own handlers wait for the main thread to come back from C; the byte is written at once.
        self._wakeup_before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._handlers_before = _set_handlers(lambda number, frame: None)
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        if self._attempt is not None:
            # In this order: a launcher that finds us not listening has left its word before it looked.
            self._attempt.listen(own_rank())
            if (earlier := self._attempt.asked_to_stop()) is not None:
                self._hear(earlier)
        self._thread.start()
        return self

    def _end(self) -> None:
        if self._attempt is not None:
            self._attempt.stop_listening(own_rank())
        os.write(self._mouth, bytes([_NO_SIGNAL]))
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        os.close(self._ear)
        os.close(self._mouth)
        Preemption._running = None

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._ear, select.POLLIN)
        while True:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            if not poll.poll(None if left is None else left * 1e3):
                self._leave_late()
            for number in os.read(self._ear, 64):
                if number == _NO_SIGNAL:
                    return
                if number in SIGNALS:
                    self._hear(signal.Signals(number).name)

    def _hear(self, name: str) -> None:
        # The launcher's agent also sends SIGTERM to the survivors of a failed rank. They have nothing to wait for.
        if self._attempt is not None and self._attempt.lost_ranks():
            leave(STOPPED)
        if self.asked is None:
            self._deadline = time.monotonic() + self.grace
            self.asked = name

    def _leave_late(self) -> None:
        late = TimeoutError(f"{self.asked} asked the run to stop, and it had not ended {self.grace:g} s later.")
        if self._attempt is None:
            print(f"error: {late}", file=sys.stderr)
        else:
            self._attempt.leave_words(own_rank(), late)
        leave(1)


class Forwarding:
    """In the launcher: hands the first of the signals on to the ranks, which save and end. A second changes nothing."""

    def __init__(self, attempt: Callable[[], Attempt], *, grace: float = GRACE) -> None:
        self._attempt, self.grace = attempt, grace
        self.asked: str | None = None
        self._deadline: float | None = None

    @property
    def overdue(self) -> bool:
        """Whether the ranks have had all of their time."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def __enter__(self) -> Forwarding:
        main = threading.current_thread() is threading.main_thread()
        self._handlers_before = _set_handlers(self._hand_on) if main else {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            return
        self.asked = signal.Signals(number).name
        self._deadline = time.monotonic() + self.grace + _MARGIN
        attempt = self._attempt()
        attempt.ask_to_stop(self.asked)
        for pid in attempt.listeners():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _set_handlers(handler: Callable[[int, FrameType | None], Any]) -> dict[signal.Signals, Any]:
    """Take both signals; returns what took them before."""
    before: dict[signal.Signals, Any] = {number: signal.signal(number, handler) for number in SIGNALS}
    for number in SIGNALS:
        signal.siginterrupt(number, False)  # C code that waits need not know that a signal came
    return before


def spare_loader(worker: int) -> None:
    """For a data-loading process: end with its rank, and pass over one SIGTERM, and SIGUSR1.

    Schedulers may signal every process of a job, and a rank needs its loaders until it has stopped. A second SIGTERM
    ends them: torch sends one to those that do not leave by themselves, and Python another at its end.
    """
    end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _in_forked_child() -> None:
    """A child is not the rank, and shares the pipe with it: what ends it must not look like a word to the rank."""
    running, Preemption._running = Preemption._running, None
    if running is not None:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_forked_child)
