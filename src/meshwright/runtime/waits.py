"""How long a run's steps waited, for data and for peers: what limited the run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

from meshwright.assemble.world import World
from meshwright.launch.heartbeat import own_heartbeat

NOTABLE = 0.2
"""Share of a step from which waiting is what limits a run."""
DATA, PEERS, RANK, COMPUTE = "data", "communication", "a slow rank", "compute"
T = TypeVar("T")


class WaitWatch:
    """Adds up how long this rank waits for its batches and its peers."""

    def __init__(self, warm_up: int) -> None:
        """The first `warm_up` steps are left out."""
        self._warm_up, self._waits = warm_up, list[float]()
        self._peers_before = 0.0

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches; measures how long each takes to come."""
        source = iter(batches)
        while True:
            begun = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            if len(self._waits) == self._warm_up:
                self._peers_before = own_heartbeat().waited
            self._waits.append(time.perf_counter() - begun)
            yield batch

    def limit(self, world: World, step: float | None, device_waits: float, *, measures_peers: bool) -> Limit | None:
        """What limited the run; None after too few steps. All ranks call it.

        `step`: median seconds of a step. `device_waits`: share of the steps in which the host waited for its GPU, which
        then was not idle for want of data.
        """
        counted = self._waits[self._warm_up :]
        waited = own_heartbeat().waited - self._peers_before
        own = (median(counted), waited / len(counted) if measures_peers else 0.0) if counted else None
        if device_waits > 1 - NOTABLE and own is not None:
            own = (0.0, own[1])
        found = [one for one in world.gather(own) if one is not None]
        if step is None or len(found) < world.ranks:
            return None
        return find_limit(step, [data for data, _ in found], [peers for _, peers in found])


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What limited a run."""

    cause: str
    """One of `DATA`, `PEERS`, `RANK` and `COMPUTE`."""
    share: float
    """Of a step."""
    seconds: float
    """Of each step."""
    rank: int | None = None
    """The rank that has the cause, if it is one rank's."""

    def sentence(self) -> str:
        share = f"{self.share:.0%} of each step"
        if self.cause == DATA:
            return f"Loading data limited the run: rank {self.rank} waited for its batches {share}."
        if self.cause == PEERS:
            return f"Communication limited the run: every rank waited for it {share}."
        if self.cause == RANK:
            return f"Rank {self.rank} limited the run: the others waited for it {share}."
        return f"Computation limited the run: it took {share}."

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence()}


def find_limit(step: float, data: list[float], peers: list[float]) -> Limit:
    """The limit, from each rank's seconds of waiting in a step.

    What even the last rank waits for its peers is communication; what the others wait longer is that rank's doing.
    """
    slowest = max(range(len(data)), key=data.__getitem__)
    last = min(range(len(peers)), key=peers.__getitem__)
    behind = median(sorted(peers)[1:]) - peers[last] if len(peers) > 1 else 0.0
    waits = (
        Limit(cause=DATA, seconds=data[slowest], share=min(1.0, data[slowest] / step), rank=slowest),
        Limit(cause=PEERS, seconds=peers[last], share=min(1.0, peers[last] / step)),
        Limit(cause=RANK, seconds=behind, share=min(1.0, behind / step), rank=last),
    )
    # A rank whose data is late makes the others wait: the data is the cause.
    first = waits[0] if waits[0].share >= NOTABLE else max(waits[1:], key=lambda wait: wait.share)
    if first.share >= NOTABLE:
        return first
    rest = max(0.0, step - data[slowest] - peers[last])
    return Limit(cause=COMPUTE, seconds=rest, share=min(1.0, rest / step))
