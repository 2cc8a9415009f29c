"""Which failure an attempt is blamed on, and what of it is worth a restart."""

import signal
from pathlib import Path

import pytest

from meshwright.errors import OutOfMemory, RankFailed
from meshwright.launch.attempt import Attempt
from meshwright.launch.failure import Failure, first_failure
from meshwright.launch.oom_killer import count_oom_kills


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt(tmp_path, 0)
    made.set_up()
    return made


def test_out_of_memory_keeps_its_report(attempt: Attempt) -> None:
    attempt.report_error(1, OutOfMemory("Rank 1 ran out of memory.", {"rank": 1, "limit": 5}))
    failure = Failure.from_json(first_failure(attempt, {1: 2}).to_json())  # as other nodes get it
    error = failure.error(restarts=0)
    assert isinstance(error, OutOfMemory)
    assert error.details == {"rank": 1, "limit": 5}


def test_a_kill_is_told_apart(attempt: Attempt) -> None:
    killed = {1: -signal.SIGKILL}
    by_kernel = first_failure(attempt, killed, oom_kills=1)
    assert by_kernel.kind is OutOfMemory and "out-of-memory killer" in by_kernel.message
    by_someone = first_failure(attempt, killed)
    assert by_someone.kind is None
    assert isinstance(by_someone.error(0), RankFailed)


def test_counters(tmp_path: Path) -> None:
    machine, container, missing = tmp_path / "vmstat", tmp_path / "memory.events", tmp_path / "none"
    machine.write_text("pgfault 12\noom_kill 3\n")
    container.write_text("low 0\noom 7\noom_kill 1\n")
    assert count_oom_kills((container, machine, missing)) == 3
    assert count_oom_kills((missing,)) == 0
