"""Ranks that fail, are restarted or asked to stop: with a toy worker, so that they start at once."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import api as multiprocessing

from meshwright.errors import NonFiniteLoss, RankFailed
from meshwright.launch import hangs, preemption
from meshwright.launch.launch import launch
from meshwright.launch.rendezvous import LocalRendezvous
from toy_worker import wait_for

TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGURG)


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks find the toy worker; handlers are afterwards what they were before; nobody is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    before = [signal.getsignal(number) for number in TAKEN]
    yield
    assert [signal.getsignal(number) for number in TAKEN] == before
    assert not [child for child in psutil.Process().children() if "toy_worker" in child.cmdline()]


def run(does: str, *, max_restarts: int = 0, grace: float = 60.0, patience: float = 0.0, **rest: str) -> list[Any]:
    results: list[Any] = []
    task = {"does": does, **rest}
    launch(task, 2, results=results, max_restarts=max_restarts, grace=grace, worker="toy_worker", patience=patience)
    return results


@pytest.mark.slow
def test_a_killed_rank_restarts_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("is_killed_once", max_restarts=2) == [1]
    lines = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert len(lines) == 1
    assert re.fullmatch("Rank 1 was ended by SIGKILL.*; restart 1 of 2", lines[0])


@pytest.mark.slow
@pytest.mark.parametrize("code", ["7", "1", "0"])
def test_a_rank_that_leaves_without_a_word_is_named(code: str) -> None:
    with pytest.raises(RankFailed, match=f"^Rank 1 ended with exit code {code} ") as caught:
        run("leaves_with_a_code", code=code)
    assert (caught.value.rank, caught.value.ended_with, caught.value.signal) == (1, int(code), None)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "place"), [("asleep", "in forward_that_hangs"), ("busy", "in forward_that_hangs")])
def test_a_rank_that_hangs_is_named_with_its_line(how: str, place: str) -> None:
    with pytest.raises(RankFailed, match=r"^Rank 1 has been silent for \d+ s in step 2 on \S+: ") as caught:
        run("hangs", patience=1.0, how=how)
    assert caught.value.rank == 1
    assert place in caught.value.traceback and "toy_worker.py" in caught.value.traceback


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "ANSWER_S", 0.5)
    with pytest.raises(RankFailed, match=r"^Rank 1 has been silent .*: it does not answer"):
        run("hangs", patience=1.0, how="stopped")


@pytest.mark.slow
def test_a_signal_is_a_field() -> None:
    with pytest.raises(RankFailed) as caught:
        run("is_killed_once")
    assert (caught.value.signal, caught.value.ended_with) == ("SIGKILL", None)


@pytest.mark.slow
def test_a_killed_launcher_takes_its_ranks_with_it(tmp_path: Path) -> None:
    """And its folder, and what its ranks started."""
    program = (
        "from meshwright.launch.launch import launch\n"
        f"task = {{'does': 'starts_a_child', 'seen': {str(tmp_path)!r}}}\n"
        "launch(task, 2, results=[], worker='toy_worker', grace=30.0)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    launcher = subprocess.Popen([sys.executable, "-c", program], env=environment)
    wait_for(lambda: len(list(tmp_path.glob("pids-*"))) == 2)
    (folder,) = tmp_path.glob("meshwright-*")
    pids = [int(pid) for path in tmp_path.glob("pids-*") for pid in path.read_text().split()]
    assert len(pids) == 4 and all(map(is_running, pids))
    assert {address for pid in pids[:1] for address in listening(pid)} <= {"127.0.0.1"}
    assert set(listening(launcher.pid)) == {"127.0.0.1"}
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(is_running, pids)))
    wait_for(lambda: not folder.exists())


def listening(pid: int) -> list[str]:
    return [c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


@pytest.mark.slow
def test_ranks_meet_anew_after_a_restart(tmp_path: Path) -> None:
    """One restart is enough: nobody finds a peer's address of the attempt before."""
    assert run("meets_on_gloo", max_restarts=1, seen=str(tmp_path / "seen")) == [[1, 2.0]]


@pytest.mark.slow
def test_children_of_a_killed_rank_are_ended(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="Rank 1 was ended by SIGKILL"):
        run("leaves_a_child", seen=str(tmp_path / "seen"))
    wait_for(lambda: not is_running(int((tmp_path / "seen").read_text())))


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_every_attempt_meets_at_a_store_of_its_own() -> None:
    meeting = LocalRendezvous("run")
    first = meeting.next_rendezvous()
    first.store.set("address", "old")
    second = meeting.next_rendezvous()
    assert not second.store.check(["address"])
    ports = [info.bootstrap_store_info.master_port for info in (first, second) if info.bootstrap_store_info]
    client = dist.TCPStore("127.0.0.1", ports[1], is_master=False)
    client.set("address", "new")
    assert (first.store.get("address"), second.store.get("address")) == (b"old", b"new")


@pytest.mark.slow
def test_the_last_attempt_is_the_one_that_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match=r"Rank 1 failed: ValueError: bad sample in attempt 2 \(after 2 restarts\)"):
        run("raises", max_restarts=2)
    told = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert told == [
        "Rank 1 failed: ValueError: bad sample in attempt 0; restart 1 of 2",
        "Rank 1 failed: ValueError: bad sample in attempt 1; restart 2 of 2",
    ]


@pytest.mark.slow
def test_without_restarts_the_message_is_as_it_was() -> None:
    with pytest.raises(RankFailed, match=r"^Rank 1 failed: ValueError: bad sample in attempt 0$") as caught:
        run("raises")
    assert caught.value.rank == 1 and "toy_worker.py" in caught.value.traceback


@pytest.mark.slow
def test_a_mistake_is_not_restarted(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NonFiniteLoss, match=r"^The loss became nan\.$"):
        run("loses_its_loss", max_restarts=3)
    assert "restart" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_reaches_the_ranks(name: str) -> None:
    assert run("is_asked", signal=name) == [name]


@pytest.mark.slow
def test_ranks_that_do_not_end_say_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed, match=r"SIGTERM asked the run to stop, and it had not ended 0\.5 s later"):
        run("does_not_end", max_restarts=3, grace=0.5)
    assert "restart" not in capfd.readouterr().err


@pytest.mark.slow
def test_stuck_ranks_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_MARGIN", 0.0)
    with pytest.raises(RankFailed, match=r"its ranks had not ended 0\.5 s later and were killed"):
        run("is_stuck", max_restarts=3, grace=0.5)


@pytest.mark.slow
def test_an_interrupt_ends_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        run("is_interrupted", max_restarts=3)


@pytest.mark.slow
def test_an_interrupt_while_ranks_are_started_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch's agent knows the ranks that it would end."""
    start = multiprocessing.get_subprocess_handler

    def start_and_be_interrupted(*args: Any, **rest: Any) -> Any:
        started = start(*args, **rest)
        os.kill(os.getpid(), signal.SIGINT)
        return started

    monkeypatch.setattr(multiprocessing, "get_subprocess_handler", start_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("waits", max_restarts=3)
