"""Torch's elastic agent, with public names for its steps (PyTorch 2.11 to 2.13).

Torch documents `_start_workers`, `_monitor_workers` and `_shutdown` as methods to extend, but not the state they use.
"""

from __future__ import annotations

import signal
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

__all__ = ["RankAgent", "SignalException"]


class RankAgent(LocalElasticAgent):
    """Starts and monitors the ranks of one machine; subclasses extend the steps."""

    def start_ranks(self) -> dict[int, Any]:
        """Start all ranks of this node and return their process ids by local rank."""
        started: dict[int, Any] = super()._start_workers(self._worker_group)
        return started

    def look_at_ranks(self) -> RunResult:
        """Check whether the ranks are running, done or failed."""
        result: RunResult = super()._monitor_workers(self._worker_group)
        return result

    def stop_ranks(self) -> None:
        """End the ranks of an attempt that is over."""
        super()._stop_workers(self._worker_group)

    def kill_ranks(self) -> None:
        self._shutdown(signal.SIGKILL)

    @property
    def own_ranks(self) -> list[int]:
        """The ranks of this node in the current attempt."""
        return [worker.global_rank for worker in self._worker_group.workers]

    @property
    def world_size(self) -> int:
        """The ranks of all nodes in the current attempt."""
        return int(self._worker_group.workers[0].world_size)

    @property
    def node(self) -> tuple[int, int]:
        """This node's number in the current attempt, and the number of nodes."""
        group: Any = self._worker_group
        return group.group_rank, group.group_world_size

    @property
    def store(self) -> Store:
        """The store of the current attempt's rendezvous."""
        group: Any = self._worker_group
        store: Store = group.store
        return store

    @property
    def max_restarts(self) -> int:
        return self._worker_group.spec.max_restarts

    @property
    def restarts_left(self) -> int:
        return self._remaining_restarts

    @restarts_left.setter
    def restarts_left(self, count: int) -> None:
        self._remaining_restarts = count

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_ranks()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_ranks()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.look_at_ranks()
