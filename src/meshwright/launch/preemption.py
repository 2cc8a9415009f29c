"""Save and stop on SIGTERM and SIGUSR1, which schedulers send some time before they take the machine away.

    with Preemption(grace=30) as preemption:
        for batch in run.batches():
            run.trainer.wish_to_stop = preemption.asked is not None
            if run.step(batch).stop:      # the same on every rank
                break

A separate thread of the rank notices the signal, even while the main thread waits for a collective. In the launcher,
`Forwarding` passes the signal on to the ranks.
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
from types import FrameType
from typing import IO, Any, ClassVar

from meshwright.environment import own_rank
from meshwright.launch.attempt import Attempt, exit_now, own_attempt
from meshwright.launch.heartbeat import dump_on_signal
from meshwright.launch.parent_death import end_with

GRACE = 30.0
"""Seconds that a run has to end after the signal."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOPPED = 128 + signal.SIGTERM
"""Exit code of a rank that was stopped because a peer failed."""
_kept_open: list[IO[str]] = []  # the file of a data-loading process's stacks
_NO_SIGNAL = 0  # tells the thread to end
_MARGIN = 5.0  # seconds after the grace time in which ranks may report that they were too slow


class Preemption:
    """Whether a signal asked this process to stop. Entered inside another one, it returns that one.

    Outside the main thread Python allows no handlers, so no signal is seen there.
    """

    _running: ClassVar[Preemption | None] = None

    def __init__(self, *, grace: float = GRACE) -> None:
        self.grace = grace
        self.asked: str | None = None
        """The name of the signal, once one came."""
        self._deadline: float | None = None
        self._attempt = own_attempt()

    def __enter__(self) -> Preemption:
        return self.begin()

    def __exit__(self, *error: object) -> None:
        if Preemption._running is self:
            self._end()

    def begin(self) -> Preemption:
        """Listen until the `with` block or the process ends."""
        if Preemption._running is not None:
            return Preemption._running
        if threading.current_thread() is not threading.main_thread():
            return self
        Preemption._running = self
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # Python's handlers run only once the main thread is back from C; the wakeup byte is written at once.
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._handlers_before = _set_handlers(lambda number, frame: None)
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        if self._attempt is not None:
            # In this order: a launcher that does not find us listening has written `asked` before it looked.
            self._attempt.listen(own_rank())
            if (earlier := self._attempt.asked_to_stop()) is not None:
                self._note_signal(earlier)
        self._thread.start()
        return self

    def _end(self) -> None:
        if self._attempt is not None:
            self._attempt.stop_listening(own_rank())
        os.write(self._write_end, bytes([_NO_SIGNAL]))
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        os.close(self._read_end)
        os.close(self._write_end)
        Preemption._running = None

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        while True:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            if not poll.poll(None if left is None else left * 1e3):
                self._exit_late()
            for number in os.read(self._read_end, 64):
                if number == _NO_SIGNAL:
                    return
                if number in SIGNALS:
                    self._note_signal(signal.Signals(number).name)

    def _note_signal(self, name: str) -> None:
        # The launcher's agent also sends SIGTERM to the survivors of a failed rank. They end at once.
        if self._attempt is not None and self._attempt.lost_ranks():
            exit_now(STOPPED)
        if self.asked is None:
            self._deadline = time.monotonic() + self.grace
            self.asked = name

    def _exit_late(self) -> None:
        late = TimeoutError(f"{self.asked} asked the run to stop, and it had not ended {self.grace:g} s later.")
        if self._attempt is None:
            print(f"error: {late}", file=sys.stderr)
        else:
            self._attempt.report_error(own_rank(), late)
        exit_now(1)


class Forwarding:
    """In the launcher: passes the first signal on to the ranks, which save and end. Later signals are ignored."""

    def __init__(self, attempt: Callable[[], Attempt], *, grace: float = GRACE) -> None:
        self._attempt, self.grace = attempt, grace
        self.asked: str | None = None
        self._deadline: float | None = None

    @property
    def overdue(self) -> bool:
        """Whether the ranks have used up their time."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def __enter__(self) -> Forwarding:
        main = threading.current_thread() is threading.main_thread()
        self._handlers_before = _set_handlers(self._forward) if main else {}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
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
    """Handle both signals; returns the previous handlers."""
    before: dict[signal.Signals, Any] = {number: signal.signal(number, handler) for number in SIGNALS}
    for number in SIGNALS:
        signal.siginterrupt(number, False)  # restart system calls that a signal interrupts
    return before


def spare_loader(worker: int) -> None:
    """Set up a data-loading process: it ends with its rank, and ignores SIGUSR1 and the first SIGTERM.

    Schedulers may signal every process of a job, but a rank needs its loaders until it has stopped. A second SIGTERM
    ends them: torch sends one to loaders that do not end by themselves, and Python another at exit.
    """
    end_with(os.getppid())
    attempt = own_attempt()
    if attempt is not None:
        _kept_open.append(dump_on_signal(attempt.loader_stack_file(own_rank(), os.getpid())))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _in_forked_child() -> None:
    """Detach a child from the rank's pipe, which it shares: its signals must not reach the rank."""
    running, Preemption._running = Preemption._running, None
    if running is not None:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_forked_child)
