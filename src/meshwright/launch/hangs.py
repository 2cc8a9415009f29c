"""Notice that heartbeats have stopped, and ask every rank what it is doing.

The launcher watches the ranks that it started. Under another launcher, a rank watches itself.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from meshwright.environment import launched, own_rank
from meshwright.launch.attempt import Attempt, exit_now, own_attempt
from meshwright.launch.heartbeat import DUMP, Beat, own_heartbeat
from meshwright.launch.rank_reports import Hang, RankReport, judge
from meshwright.launch.stacks import own_stack, read_stack

LOOK_EVERY_S = 1.0
ANSWER_S = 5.0
"""How long a rank may take to dump its stacks, which a signal handler in C does."""


class HangWatch:
    """Checks the heartbeats of an attempt's ranks, at most once per second."""

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`patience`: seconds, as in `Beat.limit`."""
        self._patience, self._clock = patience, clock
        self._looked = clock()

    def find(self, attempt: Attempt) -> Hang | None:
        """The rank that the others wait for, once it is silent for longer than its limit.

        A rank that compiles, saves or starts has a longer limit than the ranks that wait for it.
        """
        return judge(self.reports(attempt)) if self.is_due() and self.is_late(attempt) else None

    def is_due(self) -> bool:
        """Whether it is time to look again."""
        if self._clock() - self._looked < LOOK_EVERY_S:
            return False
        self._looked = self._clock()
        return True

    def is_late(self, attempt: Attempt) -> bool:
        """Whether a rank is silent for longer than its limit."""
        return any(self._late(beat) for beat in attempt.beats().values())

    def reports(self, attempt: Attempt) -> list[RankReport]:
        """What every rank of this node is doing now."""
        beats = attempt.beats()
        ask_for_stacks(attempt, beats)
        host = socket.gethostname()
        return [
            RankReport(
                rank=rank,
                host=host,
                doing=beat.doing,
                step=beat.step,
                silent=self._looked - beat.at,
                late=self._late(beat),
                stack=read_stack(attempt.stacks(rank), beat.thread),
                loaders=tuple(read_stack(text) for text in attempt.loader_stacks(rank).values()),
                collectives=tuple(attempt.collectives(rank)),
            )
            for rank, beat in beats.items()
        ]

    def _late(self, beat: Beat) -> bool:
        return self._looked - beat.at > beat.limit(self._patience)


def ask_for_stacks(attempt: Attempt, beats: dict[int, Beat]) -> None:
    """Ask all ranks and their data-loading processes for their stacks, and wait a moment for the answers."""
    attempt.ask()
    loaders = [pid for rank in beats for pid in attempt.loader_stacks(rank)]
    for pid in [*attempt.pids().values(), *loaders]:
        with suppress(ProcessLookupError):
            os.kill(pid, DUMP)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        stacks = all(read_stack(attempt.stacks(rank), beat.thread).frames for rank, beat in beats.items())
        if stacks and all(attempt.has_told(rank) for rank in beats):
            return
        time.sleep(0.05)


@contextmanager
def watching_itself(patience: float) -> Iterator[None]:
    """Under another launcher: a silent rank prints its stack and ends, so that the launcher restarts it."""
    place = launched()
    if not patience or place is None or place.ranks == 1 or own_attempt() is not None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch_itself, args=(patience, ended), name="silence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch_itself(patience: float, ended: threading.Event) -> None:
    while not ended.wait(LOOK_EVERY_S):
        beat = own_heartbeat().last
        seconds, limit = time.monotonic() - beat.at, beat.limit(patience)
        # If the main thread never releases the GIL, this thread in C, which needs no GIL, ends the process.
        faulthandler.dump_traceback_later(limit + ANSWER_S, exit=True)
        if seconds > limit:
            report = RankReport(
                rank=own_rank(),
                host=socket.gethostname(),
                doing=beat.doing,
                step=beat.step,
                silent=seconds,
                late=True,
                stack=own_stack(beat.thread),
            )
            hang = judge([report])
            assert hang is not None
            print(f"{hang.text}\nerror: {hang.message}", file=sys.stderr, flush=True)
            exit_now(1)
