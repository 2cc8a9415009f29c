"""Torch's elastic agent for the ranks of this machine: restarts after failures on any node, and ending signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from meshwright.environment import announce_attempt
from meshwright.launch.attempt import Attempt
from meshwright.launch.failure import Failure, first_failure
from meshwright.launch.hangs import LOOK_EVERY_S, HangWatch
from meshwright.launch.node_options import NodeOptions
from meshwright.launch.oom_killer import count_oom_kills
from meshwright.launch.peers import Peers
from meshwright.launch.preemption import GRACE, Forwarding
from meshwright.launch.rendezvous import LOOPBACK, LocalRendezvous, NodeRendezvous
from meshwright.launch.stragglers import StragglerWatch
from meshwright.torch_private.elastic import RankAgent, SignalException

UNUSED = "SIGURG"
"""The signal that torch's agent handles instead of those that we do: one that no process sends."""
Agree = Callable[[Callable[[], str]], str]
"""Makes a text on node 0, and returns it on every node."""
_TORCH_KILLS_AFTER_S = 29.0  # after another rank failed, torch kills ranks that have not ended by then


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
        hang_ends: bool = False,
        nodes: NodeOptions | None = None,
        adapt: Callable[[Attempt, int, Agree], None] | None = None,
    ) -> None:
        """`nodes`: None for this machine alone.

        `adapt` is told the number of all ranks before an attempt starts, and how nodes agree on a text.
        """
        self._meeting = LocalRendezvous(folder.name) if nodes is None else NodeRendezvous(nodes)
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=self._meeting,
            entrypoint=command[0],
            args=command[1:],
            max_restarts=max_restarts,
            monitor_interval=0.1,
            local_addr=LOOPBACK if nodes is None else nodes.address,
        )
        shown = 1 if nodes is None or nodes.rank == 0 else 0  # rank 0 is on node 0
        silenced = {rank: Std.ALL for rank in range(shown, ranks)} or Std.NONE
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder), redirects=silenced))
        self.attempt = Attempt(folder, 0)
        self.forwarding = Forwarding(lambda: self.attempt, grace=grace)
        self._interrupts, self._watch, self._adapt = interrupts, watch, adapt
        self._hang_ends = hang_ends
        self._peers: Peers | None = None
        self._looked = self._compared = time.monotonic()
        self._stragglers = StragglerWatch()
        self._oom_kills = count_oom_kills()
        self.failure: Failure | None = None
        """Why the last attempt failed."""

    def start_ranks(self) -> dict[int, Any]:
        self.attempt, self.failure = Attempt(self.attempt.folder, self._meeting.round), None
        self.attempt.set_up()
        self._stragglers = StragglerWatch()
        self._oom_kills = count_oom_kills()
        announce_attempt(self.attempt.number)
        if isinstance(self._meeting, NodeRendezvous):
            self._peers = Peers(self._meeting, self.store, self.node, self.own_ranks)
        if self._adapt is not None:
            self._adapt(self.attempt, self.world_size, self._agree_on)
        with self._interrupts.after_start():
            pids = super().start_ranks()
            self.attempt.started({self.own_ranks[local]: pid for local, pid in pids.items()})
        return pids

    def stop_ranks(self) -> None:
        super().stop_ranks()
        self._leave_peers()

    def close(self) -> None:
        """Tell nodes that come later that the run has ended."""
        self._leave_peers()
        if self.failure is None or not self.failure.final:
            self._meeting.shutdown()

    def _leave_peers(self) -> None:
        if self._peers is not None:
            self._peers.end()

    def look_at_ranks(self) -> RunResult:
        self._compare_ranks()
        # Reasons to kill the ranks ourselves.
        trouble = None if self._peers is None else self._peers.trouble()
        cause = self._overdue() if self.forwarding.overdue else trouble or self._hang()
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
            own = cause or first_failure(self.attempt, codes, oom_kills=count_oom_kills() - self._oom_kills)
            self.failure = trouble or self._agreed(own)
            self._decide(self.failure)
        return result

    def _agree_on(self, make: Callable[[], str]) -> str:
        return make() if self._peers is None else self._peers.agree_on("adapted", make)

    def _compare_ranks(self) -> None:
        """Tell of a rank that is slower than the others; with several nodes, node 0 does."""
        if self._watch is None or time.monotonic() - self._compared < LOOK_EVERY_S:
            return
        self._compared = time.monotonic()
        times = self._stragglers.own_times(self.attempt.beats())
        if self._peers is not None:
            times = self._peers.gather_times(times)
        if slow := self._stragglers.tell(times, self._peers.hosts if self._peers else {}):
            print(slow, file=sys.stderr, flush=True)

    def _agreed(self, own: Failure) -> Failure:
        """The cause of the failure of all nodes, if there are several; it may be on another one."""
        if self._peers is None:
            return own
        final = own.final or own.kind is not None or self.forwarding.asked is not None or not self.restarts_left
        return self._peers.agree(replace(own, host=self._peers.own.host, final=final))

    def _hang(self) -> Failure | None:
        if self._watch is None:
            return None
        peers = self._peers
        found = self._watch.find(self.attempt) if peers is None else peers.find_hang(self._watch, self.attempt)
        if found is None:
            return None
        return Failure(rank=found.rank, message=found.message, traceback=found.text, final=self._hang_ends)

    def _lost(self, result: RunResult) -> list[int]:
        """Ranks that ended without an error before their work was done."""
        if result.state == WorkerState.HEALTHY and time.monotonic() - self._looked < LOOK_EVERY_S:
            return []
        self._looked = time.monotonic()
        return [rank for rank in self.attempt.lost_ranks() if rank not in result.failures]

    def _decide(self, failure: Failure) -> None:
        """Set whether torch's loop, our caller, restarts all ranks now."""
        if failure.kind is not None or failure.final or self.forwarding.asked is not None:
            self.restarts_left = 0
        elif self.restarts_left:
            restart = f"restart {self.max_restarts - self.restarts_left + 1} of {self.max_restarts}"
            print(f"{failure.line}; {restart}", file=sys.stderr, flush=True)

    def _overdue(self) -> Failure:
        asked, grace = self.forwarding.asked, self.forwarding.grace
        late = f"{asked} asked the run to stop; its ranks had not ended {grace:g} s later and were killed."
        return Failure(rank=0, message=late)
