import signal
import sys
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from meshwright.launch.rendezvous import LocalRendezvous
from meshwright.torch_private.elastic import RankAgent, SignalException


class Counting(RankAgent):
    starts = looks = 0

    def start_ranks(self) -> dict[int, int]:
        self.starts += 1
        return super().start_ranks()

    def look_at_ranks(self):
        self.looks += 1
        return super().look_at_ranks()


def agent_for(program: str, folder: Path, max_restarts: int = 0) -> Counting:
    spec = WorkerSpec(
        role="rank",
        local_world_size=1,
        rdzv_handler=LocalRendezvous("test"),
        entrypoint=sys.executable,
        args=("-c", program),
        max_restarts=max_restarts,
        monitor_interval=0.01,
        local_addr="127.0.0.1",
    )
    return Counting(spec, DefaultLogsSpecs(log_dir=str(folder)))


def test_ranks_are_started_and_looked_at(tmp_path: Path) -> None:
    agent = agent_for("", tmp_path)
    assert not agent.run().is_failed()
    assert agent.starts == 1 and agent.looks >= 1


def test_restarts_are_counted(tmp_path: Path) -> None:
    agent = agent_for("raise SystemExit(3)", tmp_path, max_restarts=1)
    assert (agent.max_restarts, agent.restarts_left) == (1, 1)
    result = agent.run()
    assert result.is_failed() and result.failures[0].exitcode == 3
    assert (agent.starts, agent.restarts_left) == (2, 0)


def test_restarts_are_given_up(tmp_path: Path) -> None:
    agent = agent_for("raise SystemExit(3)", tmp_path, max_restarts=5)
    agent.restarts_left = 0
    agent.run()
    assert agent.starts == 1


def test_ranks_are_killed(tmp_path: Path) -> None:
    class Killing(Counting):
        def look_at_ranks(self):
            self.kill_ranks()
            return super().look_at_ranks()

    agent = agent_for("import time; time.sleep(600)", tmp_path)
    agent.__class__ = Killing
    assert agent.run().state != WorkerState.SUCCEEDED


def test_a_signal_is_raised_as_torch_raises_it() -> None:
    assert SignalException("ended", sigval=signal.SIGTERM).sigval is signal.SIGTERM


def test_an_attempt_knows_its_ranks_and_its_node(tmp_path: Path) -> None:
    agent = agent_for("", tmp_path)
    agent.run()
    assert (agent.own_ranks, agent.world_size, agent.node) == ([0], 1, (0, 1))
    agent.store.set("key", "value")
    assert agent.store.get("key") == b"value"


def test_ranks_are_stopped_before_a_restart(tmp_path: Path) -> None:
    class Stopping(Counting):
        stops = 0

        def stop_ranks(self) -> None:
            self.stops += 1
            super().stop_ranks()

    agent = agent_for("raise SystemExit(3)", tmp_path, max_restarts=1)
    agent.__class__ = Stopping
    agent.run()
    assert agent.stops >= 1
