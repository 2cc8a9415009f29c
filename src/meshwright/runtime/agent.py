"""Torch's elastic agent for the ranks of one machine, with a meeting point of its own for every attempt.

Torch documents both classes as the ones to extend: `RendezvousHandler`, and the agent with its `_start_workers` and
`_monitor_workers`.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from meshwright.runtime.attempt import Attempt
from meshwright.runtime.failure import Failure, first_failure
from meshwright.runtime.interrupts import Interrupts
from meshwright.runtime.preemption import GRACE, Forwarding

HOST = "127.0.0.1"


class Meeting(RendezvousHandler):
    """A store for the ranks of this machine, new for every attempt.

    Torch's own handler keeps one store over restarts, in which a quick rank finds the addresses that slower peers had
    in the attempt before, and fails to connect (pytorch issue 135712).
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def next_rendezvous(self) -> RendezvousInfo:
        store = TCPStore(HOST, 0, is_master=True)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(HOST, store.port))

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of the agent's store."""
        return True

    def get_backend(self) -> str:
        return "meshwright"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    """Starts ranks, and all of them anew when one fails in a way that this may mend."""

    def __init__(
        self,
        command: tuple[str, ...],
        ranks: int,
        folder: Path,
        *,
        interrupts: Interrupts,
        max_restarts: int = 0,
        grace: float = GRACE,
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=Meeting(folder.name),
            entrypoint=command[0],
            args=command[1:],
            max_restarts=max_restarts,
            monitor_interval=0.1,
            local_addr=HOST,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder), redirects=_only_rank_0_speaks(ranks)))
        self.attempt = Attempt(folder, 0)
        self.forwarding = Forwarding(lambda: self.attempt, grace=grace)
        self._interrupts = interrupts
        self.failure: Failure | None = None
        """What the last attempt failed of."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # As ranks are told it: torch's TORCHELASTIC_RESTART_COUNT.
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        self.attempt, self.failure = Attempt(self.attempt.folder, restarts), None
        self.attempt.set_up()
        with self._interrupts.after_start():
            pids: dict[int, Any] = super()._start_workers(worker_group)
            self.attempt.started(pids)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        killed = self.forwarding.overdue
        if killed:
            self._shutdown(signal.SIGKILL)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            for failure in result.failures.values():
                _end_children_of(failure.pid)
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self.failure = self._killed(next(iter(codes))) if killed else first_failure(self.attempt, codes)
            self._decide(self.failure)
        return result

    def _decide(self, failure: Failure) -> None:
        """Whether torch's loop, which called us, restarts all ranks now."""
        if not failure.mendable or self.forwarding.asked is not None:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            number, limit = self.attempt.number + 1, self._worker_group.spec.max_restarts
            print(f"{failure.line}; restart {number} of {limit}", file=sys.stderr, flush=True)

    def _killed(self, rank: int) -> Failure:
        forwarding = self.forwarding
        message = f"{forwarding.asked} asked the run to stop; its ranks had not ended {forwarding.grace:g} s later and "
        return Failure(rank=rank, message=f"{message}were killed.")


def _end_children_of(rank: int) -> None:
    """What a rank that is gone has left running: the agent started each rank as the head of a process group."""
    with suppress(ProcessLookupError):
        os.killpg(rank, signal.SIGKILL)


def _only_rank_0_speaks(ranks: int) -> dict[int, Std] | Std:
    return {rank: Std.ALL for rank in range(1, ranks)} or Std.NONE
