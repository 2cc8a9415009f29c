"""Which rank is said to hang, and when: from beats and stacks that are made up."""

import sysconfig
from typing import Any

import pytest

from meshwright.launch.hangs import HangWatch
from meshwright.launch.heartbeat import AT_LEAST, COMPILING, SAVING, STARTING, STEPPING, Beat
from meshwright.launch.rank_reports import Hang

WAITING = 'Thread 0x0000000000000001 (most recent call first):\n  File "/x/torch/distributed/c.py", line 1 in wait\n'
WORKING = 'Thread 0x0000000000000001 (most recent call first):\n  File "/home/model.py", line 7 in forward\n'
PATIENCE = 10.0
LIBRARIES = sysconfig.get_path("purelib")


class MadeUpAttempt:
    def __init__(self, beats: dict[int, Beat], stacks: dict[int, str], collectives: dict[int, list[Any]]) -> None:
        self._beats, self._stacks, self._collectives = beats, stacks, collectives

    def beats(self) -> dict[int, Beat]:
        return self._beats

    def ask(self) -> None: ...

    def has_told(self, rank: int) -> bool:
        return True

    def pids(self) -> dict[int, int]:
        return {}

    def stacks(self, rank: int) -> str:
        return self._stacks[rank]

    def loader_stacks(self, rank: int) -> dict[int, str]:
        return {}

    def collectives(self, rank: int) -> list[Any]:
        return self._collectives.get(rank, [])


def beat(doing: str, *, at: float = 0.0, step: int = 3) -> Beat:
    return Beat(doing=doing, step=step, longest=1.0, at=at, thread=1)


def find(
    beats: dict[int, Beat], stacks: dict[int, str], *, now: float, collectives: dict[int, list[Any]] | None = None
) -> Hang | None:
    times = iter([now - 5.0, now, now])
    attempt = MadeUpAttempt(beats, stacks, collectives or {})
    return HangWatch(PATIENCE, clock=lambda: next(times)).find(attempt)  # type: ignore[arg-type]


def test_the_rank_that_the_others_wait_for() -> None:
    beats = {0: beat(STEPPING), 1: beat(STEPPING, at=0.5)}
    found = find(beats, {0: WAITING, 1: WORKING}, now=20.0)
    assert found is not None and found.rank == 1
    assert "model.py:7, in forward" in found.message


@pytest.mark.parametrize("doing", [STARTING, COMPILING, SAVING])
def test_a_peer_that_may_take_longer(doing: str) -> None:
    beats = {0: beat(STEPPING), 1: beat(doing)}
    stacks = {0: WAITING, 1: WORKING}
    assert find(beats, stacks, now=20.0) is None
    found = find(beats, stacks, now=AT_LEAST + 20.0)
    assert found is not None and found.rank == 1


def test_nobody_is_late() -> None:
    beats = {0: beat(STEPPING), 1: beat(STEPPING)}
    assert find(beats, {0: WAITING, 1: WAITING}, now=10.5) is None


def waiting_in(collective: str, line: int) -> str:
    return (
        "Thread 0x0000000000000001 (most recent call first):\n"
        f'  File "{LIBRARIES}/torch/distributed/distributed_c10d.py", line 1 in {collective}\n'
        f'  File "{LIBRARIES}/torch/distributed/c10d_logger.py", line 1 in wrapper\n'
        f'  File "/home/model.py", line {line} in forward\n'
    )


def call(number: int, name: str) -> dict[str, Any]:
    return {"group": "0:default_pg", "number": number, "name": name, "sizes": []}


@pytest.mark.parametrize("recorded", [True, False])
def test_the_rank_that_is_in_another_collective(recorded: bool) -> None:
    """With PyTorch's records, and by the stacks alone where there are none."""
    beats = {rank: beat(STEPPING) for rank in range(3)}
    stacks = {0: waiting_in("all_reduce", 7), 1: waiting_in("barrier", 9), 2: waiting_in("all_reduce", 7)}
    calls = {0: [call(1, "broadcast"), call(2, "all_reduce")], 1: [call(1, "broadcast"), call(2, "barrier")]}
    calls[2] = calls[0]
    found = find(beats, stacks, now=20.0, collectives=calls if recorded else {})
    assert found is not None and found.rank == 1
    assert "rank 1 is in barrier at model.py:9, in forward" in found.message
    assert "rank 0 is in all_reduce at model.py:7, in forward" in found.message
    assert all(f"rank {rank} on " in found.text for rank in range(3))


def test_ranks_that_wait_in_the_same_collective() -> None:
    beats = {rank: beat(STEPPING) for rank in range(2)}
    found = find(beats, dict.fromkeys(range(2), waiting_in("all_reduce", 7)), now=20.0)
    assert found is not None and "it waits for its peers, as they do" in found.message
