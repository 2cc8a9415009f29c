"""Find the rank that hangs when heartbeats stop.

Note on how: a rank that waits for a peer is in a collective, or in a backward pass, whose hooks communicate. A rank
that is anywhere else, or cannot dump its stacks, is the one that the others wait for.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.environment import launched, own_rank
from meshwright.launch.attempt import Attempt, exit_now, own_attempt
from meshwright.launch.heartbeat import DUMP, STARTING, STEPPING, Beat, own_heartbeat

LOOK_EVERY_S = 1.0
ANSWER_S = 5.0
"""How long a rank may take to dump its stacks, which a signal handler in C does."""
_FRAME = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
_WAITING = ("torch/distributed/", "torch/autograd/graph.py", "meshwright/assemble/world.py", "torch/_C/_distributed")
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name))) for name in ("stdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1])}
)


@dataclass(frozen=True, kw_only=True)
class CallStack:
    """Call stack of a rank's main thread, innermost frame first; empty if the rank did not answer."""

    text: str
    frames: tuple[tuple[str, int, str], ...]

    @property
    def waits(self) -> bool:
        """Whether the rank waits for its peers."""
        return any(part in file for file, _, _ in self.frames[:6] for part in _WAITING)

    @property
    def place(self) -> str:
        """The innermost line of the user's code; without one, the innermost of all."""
        own = [frame for frame in self.frames if not frame[0].startswith((*_LIBRARIES, "<"))]
        if not self.frames:
            return "it does not answer, so it may be stopped, or stuck in the system"
        file, line, name = (own or list(self.frames))[0]
        return f"it stands at {Path(file).name}:{line}, in {name}"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A rank whose heartbeat has stopped for longer than its limit."""

    rank: int
    seconds: float
    beat: Beat
    stack: CallStack

    @property
    def message(self) -> str:
        doing = f"in step {self.beat.step + 1}" if self.beat.doing == STEPPING else f"while {self.beat.doing}"
        waits = "; it waits for its peers, as they do" if self.stack.waits else ""
        return f"Rank {self.rank} has been silent for {self.seconds:.0f} s {doing}: {self.stack.place}{waits}."


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
        if self._clock() - self._looked < LOOK_EVERY_S:
            return None
        self._looked = self._clock()
        beats = attempt.beats()
        late = [rank for rank, beat in beats.items() if self._looked - beat.at > beat.limit(self._patience)]
        if not late:
            return None
        stacks = ask_for_stacks(attempt, beats)
        rank = blocking_rank(beats, stacks)
        if rank not in late:
            return None
        seconds = self._looked - beats[rank].at
        return Hang(rank=rank, seconds=seconds, beat=beats[rank], stack=stacks[rank])


def blocking_rank(beats: Mapping[int, Beat], stacks: Mapping[int, CallStack]) -> int:
    """The rank that the others wait for."""

    def order(rank: int) -> tuple[bool, bool, int, float]:
        beat, stack = beats[rank], stacks[rank]
        return stack.waits, beat.doing != STARTING, beat.step, beat.at

    return min(beats, key=order)


def ask_for_stacks(attempt: Attempt, beats: Mapping[int, Beat]) -> dict[int, CallStack]:
    """Stacks of all ranks; empty for those that do not answer in time."""
    for pid in attempt.pids().values():
        with suppress(ProcessLookupError):
            os.kill(pid, DUMP)
    deadline = time.monotonic() + ANSWER_S
    while True:
        found = {rank: read_stack(attempt.stacks(rank), beat.thread) for rank, beat in beats.items()}
        if time.monotonic() >= deadline or all(stack.frames for stack in found.values()):
            return found
        time.sleep(0.05)


def read_stack(text: str, thread: int) -> CallStack:
    """One thread's stack from the output of `faulthandler`."""
    parts = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text)
    own = [part for part in parts if f"0x{thread:016x}" in part.partition("\n")[0]]
    part = own[-1].rstrip() if own else ""
    frames = tuple((found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(part))
    return CallStack(text=part, frames=frames)


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
            hang = Hang(rank=own_rank(), seconds=seconds, beat=beat, stack=own_stack(beat.thread))
            print(f"{hang.stack.text}\nerror: {hang.message}", file=sys.stderr, flush=True)
            exit_now(1)


def own_stack(thread: int) -> CallStack:
    """Call stack of a thread of this process."""
    walk = traceback.walk_stack(sys._current_frames().get(thread))  # documented for this use
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk]
    text = "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in frames)
    return CallStack(text=text, frames=tuple(frames))
