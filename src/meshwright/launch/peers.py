"""What the launchers of a run's nodes tell one another during an attempt, through the store of their rendezvous.

Each says that it is alive, why its ranks failed, and what they are doing while some are silent. A thread talks to the
store, because a store whose host lost its power never answers.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from meshwright.errors import BadInput, Refused
from meshwright.launch.attempt import Attempt
from meshwright.launch.failure import Failure
from meshwright.launch.hangs import HangWatch
from meshwright.launch.rank_reports import Hang, RankReport, judge
from meshwright.launch.rendezvous import NodeRendezvous

SILENCE_S = 10.0
"""A launcher that says nothing for this long is lost."""
REPORT_S = 3.0
"""How long a launcher whose ranks failed waits for the reports of the others: theirs may be the cause."""
MAKING = timedelta(minutes=10)
"""How long node 0 may take to make what all nodes need, such as a plan."""
_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of an attempt."""

    host: str
    address: str
    ranks: list[int]

    @property
    def words(self) -> str:
        return f"{self.host} ({self.address}, rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))})"


class Peers:
    """The nodes of one attempt, as this node's launcher sees them."""

    def __init__(self, rendezvous: NodeRendezvous, store: Store, place: tuple[int, int], ranks: list[int]) -> None:
        """`place`: this node's number, and the number of nodes. Waits until every node has introduced itself."""
        self._rendezvous, self._store = rendezvous, store
        self.number, self.count = place
        own = Node(host=socket.gethostname(), address=rendezvous.address, ranks=ranks)
        self.nodes = [Node(**found) for found in self._exchange("node", asdict(own))]
        if len(sizes := {len(node.ranks) for node in self.nodes}) > 1:
            raise BadInput(f"Nodes start {' and '.join(map(str, sorted(sizes)))} ranks; give all the same --ranks.")
        now = time.monotonic()
        self._heard = {node: (0, now) for node in range(self.count)}
        """The last beat of each node, and when it came."""
        self._answered = now
        self._told: dict[int, dict[str, Any]] = {}
        self._times: dict[int, dict[str, float]] = {}
        self._reported = False
        self._reports: dict[int, dict[str, Any]] = {}
        """What the ranks of other nodes were doing when those were last asked."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="peers", daemon=True)
        self._thread.start()

    @property
    def own(self) -> Node:
        return self.nodes[self.number]

    def end(self) -> None:
        """Stop talking; a thread that waits for a lost host is left alone."""
        self._ended.set()
        self._thread.join(2 * _EVERY_S)

    def trouble(self) -> Failure | None:
        """A failure that another launcher has told, or that it is lost itself."""
        if self._told:
            return self._first(list(self._told.values()))
        for number in self._silent():
            node = self.nodes[number]
            message = f"{node.words} has been silent for {SILENCE_S:g} s: it is down, or cut off."
            return Failure(rank=node.ranks[0], message=message, host=node.host, final=self._holds_store(number))
        return None

    def agree(self, own: Failure) -> Failure:
        """Tell the others why the ranks of this node failed; returns the cause among all that failed."""
        failures = [own.to_json()]
        if not self._lost_store():
            self._store.set(f"failure-{self.number}", json.dumps(failures[0]))
            deadline = time.monotonic() + REPORT_S
            while len(self._told) + 1 + len(self._silent()) < self.count and time.monotonic() < deadline:
                time.sleep(0.05)
        return self._first(failures + list(self._told.values()))

    def agree_on(self, name: str, make: Callable[[], str]) -> str:
        """What node 0 makes, on every node; if it raises a user's mistake, all of them do."""
        if self.number == 0:
            try:
                self._store.set(name, json.dumps({"made": make()}))
            except BadInput as error:
                self._store.set(name, json.dumps({"refused": str(error)}))
        self._store.wait([name], MAKING)
        found = json.loads(self._store.get(name))
        if "refused" in found:
            raise Refused(found["refused"])
        return str(found["made"])

    def find_hang(self, watch: HangWatch, attempt: Attempt) -> Hang | None:
        """The rank that the others wait for, on any node. A node with a silent rank asks all for reports."""
        if not watch.is_due():
            return None
        late = watch.is_late(attempt)
        asked = late or any(found["late"] for found in self._reports.values())
        own = watch.reports(attempt) if asked else []
        if asked or self._reported:
            self._store.set(
                f"reports-{self.number}", json.dumps({"late": late, "ranks": [report.to_json() for report in own]})
            )
        self._reported = asked
        told = [found["ranks"] for found in self._reports.values() if found["ranks"]]
        if not asked or len(told) + 1 < self.count:
            return None  # the others answer as soon as they have seen that a rank is late
        return judge([*own, *(RankReport.from_json(report) for ranks in told for report in ranks)])

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        return {rank: node.host for node in self.nodes for rank in node.ranks}

    def gather_times(self, own: dict[int, float]) -> dict[int, float]:
        """On node 0: the own times of all ranks in their last windows, whenever node 0 has a new one."""
        if own and self.number != 0:
            self._store.set(f"times-{self.number}", json.dumps(own))
        if not own or self.number != 0 or len(self._times) + 1 < self.count:
            return {}
        return own | {int(rank): seconds for times in self._times.values() for rank, seconds in times.items()}

    def _exchange(self, name: str, value: Any) -> list[Any]:
        """Every node's value, in their order."""
        self._store.set(f"{name}-{self.number}", json.dumps(value))
        return [json.loads(self._store.get(f"{name}-{number}")) for number in range(self.count)]

    def _talk(self) -> None:
        beat, others = 0, [number for number in range(self.count) if number != self.number]
        while not self._ended.wait(_EVERY_S):
            try:
                beat += 1
                self._store.set(f"beat-{self.number}", str(beat))
                self._listen(others)
                self._rendezvous.count_waiting()
            except Exception:  # the store is gone, so nobody answers any more
                continue
            self._answered = time.monotonic()

    def _listen(self, others: Sequence[int]) -> None:
        for number in others:
            if self._store.check([f"beat-{number}"]):
                beat = int(self._store.get(f"beat-{number}"))
                if beat != self._heard[number][0]:
                    self._heard[number] = beat, time.monotonic()
            if self.number == 0 and self._store.check([f"times-{number}"]):
                self._times[number] = json.loads(self._store.get(f"times-{number}"))
            if self._store.check([f"reports-{number}"]):
                self._reports[number] = json.loads(self._store.get(f"reports-{number}"))
            if number not in self._told and self._store.check([f"failure-{number}"]):
                self._told[number] = json.loads(self._store.get(f"failure-{number}"))

    def _silent(self) -> list[int]:
        if self._lost_store():
            return [0]
        now = time.monotonic()
        # While this launcher itself was stopped, it heard nobody.
        return [
            number
            for number, (_, at) in self._heard.items()
            if number != self.number and now - at > SILENCE_S and self._answered - at > SILENCE_S
        ]

    def _lost_store(self) -> bool:
        return self.number != 0 and time.monotonic() - self._answered > SILENCE_S

    def _holds_store(self, number: int) -> bool:
        return number == 0

    def _first(self, failures: Sequence[dict[str, Any]]) -> Failure:
        """The cause among failures: a user's mistake, else a rank that was killed, else the earliest."""
        found = sorted((Failure.from_json(failure) for failure in failures), key=lambda failure: failure.order)
        return replace(found[0], final=any(failure.final for failure in found))
