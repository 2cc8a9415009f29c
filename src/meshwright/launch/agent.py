"""Torch's elastic agent for the ranks of one machine: a new rendezvous for every attempt, and signals that end it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from meshwright.launch.attempt import Attempt
from meshwright.launch.failure import Failure, first_failure
from meshwright.launch.hangs import LOOK_EVERY_S, HangWatch
from meshwright.launch.preemption import GRACE, Forwarding
from meshwright.torch_private.elastic import RankAgent, SignalException

HOST = "127.0.0.1"
UNUSED = "SIGURG"
"""The signal that torch's agent handles instead of those that we do: one that no process sends."""
_TORCH_KILLS_AFTER_S = 29.0  # after another rank failed, torch kills ranks that have not ended by then


class LocalRendezvous(RendezvousHandler):
    """Rendezvous of the ranks of this machine, with a new store for every attempt.

    Torch's handler keeps one store over restarts. A quick rank finds in it the addresses that slower peers had in the
    attempt before, and fails to connect (pytorch issue 135712).
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((HOST, 0))  # torch would listen on all interfaces
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
        """No other node can join, so nothing to do."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class Interrupts:
    """Raises signals as torch's agent does, which then ends the ranks that it knows.

    The agent knows its ranks only after all are started. An earlier signal would leave them running, so it is delayed.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._starting = False
        self._delayed: signal.Signals | None = None

    def __enter__(self) -> Interrupts:
        """Set the handlers; Python allows that in the main thread only."""
        main = threading.current_thread() is threading.main_thread()
        numbers = [signal.Signals[name] for name in self._names] if main else []
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, self._handle) for number in numbers}
        if main:
            self._before[signal.Signals[UNUSED]] = signal.getsignal(signal.Signals[UNUSED])
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def after_start(self) -> Iterator[None]:
        """Delay signals that come while ranks are started to the end of the block."""
        self._starting = True
        try:
            yield
        finally:
            self._starting = False
        if self._delayed is not None:
            raise _raised(self._delayed)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._starting:
            raise _raised(signal.Signals(number))
        self._delayed = signal.Signals(number)


def _raised(number: signal.Signals) -> SignalException:
    return SignalException(f"{number.name} ends the run.", sigval=number)


class Agent(RankAgent):
    """Starts the ranks, and restarts all of them after a failure that a restart may fix."""

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
        silenced = {rank: Std.ALL for rank in range(1, ranks)} or Std.NONE
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder), redirects=silenced))
        self.attempt = Attempt(folder, 0)
        self.forwarding = Forwarding(lambda: self.attempt, grace=grace)
        self._interrupts, self._watch = interrupts, watch
        self._looked = time.monotonic()
        self.failure: Failure | None = None
        """Why the last attempt failed."""

    def start_ranks(self) -> dict[int, Any]:
        # The number is the ranks' TORCHELASTIC_RESTART_COUNT.
        self.attempt, self.failure = Attempt(self.attempt.folder, self.max_restarts - self.restarts_left), None
        self.attempt.set_up()
        with self._interrupts.after_start():
            pids = super().start_ranks()
            self.attempt.started(pids)
        return pids

    def look_at_ranks(self) -> RunResult:
        # Reasons to kill the ranks ourselves.
        cause = self._overdue() if self.forwarding.overdue else self._hang()
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
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # what the rank left running: each rank leads a process group
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()} | dict.fromkeys(lost, 0)
            if time.monotonic() - begun >= _TORCH_KILLS_AFTER_S and any(c != -signal.SIGKILL for c in codes.values()):
                codes = {rank: code for rank, code in codes.items() if code != -signal.SIGKILL}  # torch's kills
            self.failure = cause or first_failure(self.attempt, codes)
            self._decide(self.failure)
        return result

    def _hang(self) -> Failure | None:
        found = None if self._watch is None else self._watch.find(self.attempt)
        return None if found is None else Failure(rank=found.rank, message=found.message, traceback=found.stack.text)

    def _lost(self, result: RunResult) -> list[int]:
        """Ranks that ended without an error before their work was done."""
        if result.state == WorkerState.HEALTHY and time.monotonic() - self._looked < LOOK_EVERY_S:
            return []
        self._looked = time.monotonic()
        return [rank for rank in self.attempt.lost_ranks() if rank not in result.failures]

    def _decide(self, failure: Failure) -> None:
        """Set whether torch's loop, our caller, restarts all ranks now."""
        if failure.kind is not None or self.forwarding.asked is not None:
            self.restarts_left = 0
        elif self.restarts_left:
            restart = f"restart {self.attempt.number + 1} of {self.max_restarts}"
            print(f"{failure.line}; {restart}", file=sys.stderr, flush=True)

    def _overdue(self) -> Failure:
        asked, grace = self.forwarding.asked, self.forwarding.grace
        late = f"{asked} asked the run to stop; its ranks had not ended {grace:g} s later and were killed."
        return Failure(rank=0, message=late)
