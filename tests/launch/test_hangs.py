"""Which rank is said to hang, and when: from beats and stacks that are made up."""

from pathlib import Path

import pytest

from meshwright.launch import hangs
from meshwright.launch.hangs import HangWatch
from meshwright.launch.heartbeat import AT_LEAST, COMPILING, SAVING, STARTING, STEPPING, Beat

WAITING = 'Thread 0x0000000000000001 (most recent call first):\n  File "/x/torch/distributed/c.py", line 1 in wait\n'
WORKING = 'Thread 0x0000000000000001 (most recent call first):\n  File "/home/model.py", line 7 in forward\n'
PATIENCE = 10.0


class MadeUpAttempt:
    def __init__(self, path: Path, beats: dict[int, Beat], stacks: dict[int, str]) -> None:
        self.path, self._beats, self._stacks = path, beats, stacks

    def beats(self) -> dict[int, Beat]:
        return self._beats

    def pids(self) -> dict[int, int]:
        return {}

    def stacks(self, rank: int) -> str:
        return self._stacks[rank]


def beat(doing: str, *, at: float = 0.0, step: int = 3) -> Beat:
    return Beat(doing=doing, step=step, longest=1.0, at=at, thread=1)


def find(tmp_path: Path, beats: dict[int, Beat], stacks: dict[int, str], *, now: float) -> hangs.Hang | None:
    times = iter([now - 5.0, now, now])
    attempt = MadeUpAttempt(tmp_path, beats, stacks)
    return HangWatch(PATIENCE, clock=lambda: next(times)).find(attempt)  # type: ignore[arg-type]


def test_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    beats = {0: beat(STEPPING), 1: beat(STEPPING, at=0.5)}
    found = find(tmp_path, beats, {0: WAITING, 1: WORKING}, now=20.0)
    assert found is not None and found.rank == 1
    assert "model.py:7, in forward" in found.message


@pytest.mark.parametrize("doing", [STARTING, COMPILING, SAVING])
def test_a_peer_that_may_take_longer(tmp_path: Path, doing: str) -> None:
    beats = {0: beat(STEPPING), 1: beat(doing)}
    stacks = {0: WAITING, 1: WORKING}
    assert find(tmp_path, beats, stacks, now=20.0) is None
    found = find(tmp_path, beats, stacks, now=AT_LEAST + 20.0)
    assert found is not None and found.rank == 1


def test_nobody_is_late(tmp_path: Path) -> None:
    beats = {0: beat(STEPPING), 1: beat(STEPPING)}
    assert find(tmp_path, beats, {0: WAITING, 1: WAITING}, now=10.5) is None
