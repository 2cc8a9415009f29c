"""Torch's elastic agent for the ranks of one machine, with a meeting point of its own for every attempt."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from meshwright.launch.attempt import Attempt
from meshwright.launch.failure import Failure, first_failure
from meshwright.launch.hangs import LOOK_EVERY_S, HangWatch
from meshwright.launch.interrupts import Interrupts
from meshwright.launch.preemption import GRACE, Forwarding
from meshwright.torch_private.elastic import RankAgent

HOST = "127.0.0.1"
_TORCH_KILLS_AFTER_S = 29.0  # when ranks do not end by themselves after another failed


class LocalRendezvous(RendezvousHandler):
    """A store for the ranks of this machine, new for every attempt.

    Torch's own handler keeps one store over restarts, in which a quick rank finds the addresses that slower peers had
    in the attempt before, and fails to connect (pytorch issue 135712).
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def next_rendezvous(self) -> RendezvousInfo:
        # Torch itself would listen on all interfaces.
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        store = TCPStore(HOST, port, is_master=True, master_listen_fd=listener.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(HOST, port))

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


class Agent(RankAgent):
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
        watch: HangWatch | None = None,
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=LocalRendezvous(folder.name),
            entrypoint=command[0],
            args=command[1:],
            max_restarts=max_restarts,
            monitor_interval=0.1,
            local_addr=HOST,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder), redirects=_only_rank_0_speaks(ranks)))
        self.attempt = Attempt(folder, 0)
        self.forwarding = Forwarding(lambda: self.attempt, grace=grace)
        self._interrupts, self._watch = interrupts, watch
        self._looked = time.monotonic()
        self.failure: Failure | None = None
        """What the last attempt failed of."""

    def start_ranks(self) -> dict[int, Any]:
        # As ranks are told it: torch's TORCHELASTIC_RESTART_COUNT.
        restarts = self.max_restarts - self.restarts_left
        self.attempt, self.failure = Attempt(self.attempt.folder, restarts), None
        self.attempt.set_up()
        with self._interrupts.after_start():
            pids = super().start_ranks()
            self.attempt.started(pids)
        return pids

    def look_at_ranks(self) -> RunResult:
        # What we end ranks for; what else fails, they fail of themselves.
        cause = self._killed(0) if self.forwarding.overdue else self._silent()
        if cause is not None:
            self.kill_ranks()
        begun = time.monotonic()
        result = super().look_at_ranks()
        lost = self._lost(result)
        if lost and not result.is_failed():
            self.kill_ranks()
            result = RunResult(state=WorkerState.FAILED)
        if result.is_failed():
            for pid in self.attempt.pids().values():
                _end_children_of(pid)
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()} | dict.fromkeys(lost, 0)
            if time.monotonic() - begun >= _TORCH_KILLS_AFTER_S and any(c != -signal.SIGKILL for c in codes.values()):
                codes = {rank: code for rank, code in codes.items() if code != -signal.SIGKILL}  # torch's own
            self.failure = cause or first_failure(self.attempt, codes)
            self._decide(self.failure)
        return result

    def _silent(self) -> Failure | None:
        found = None if self._watch is None else self._watch.find(self.attempt)
        return None if found is None else Failure(rank=found.rank, message=found.message, traceback=found.stack.text)

    def _lost(self, result: RunResult) -> list[int]:
        """Ranks that ended as if all were well, without having done their work."""
        if result.state == WorkerState.HEALTHY and time.monotonic() - self._looked < LOOK_EVERY_S:
            return []
        self._looked = time.monotonic()
        return [rank for rank in self.attempt.lost_ranks() if rank not in result.failures]

    def _decide(self, failure: Failure) -> None:
        """Whether torch's loop, which called us, restarts all ranks now."""
        if not failure.mendable or self.forwarding.asked is not None:
            self.restarts_left = 0
        elif self.restarts_left:
            number = self.attempt.number + 1
            print(f"{failure.line}; restart {number} of {self.max_restarts}", file=sys.stderr, flush=True)

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
