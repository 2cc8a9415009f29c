"""Who holds how much, from the first allocation to the last: a list of events, and what it came to at its peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from meshwright.tracing.allocator import Allocator, SegmentChunk


@dataclass(eq=False)
class Allocation:
    """One allocation. Its cause may become clear later than it was made."""

    chunk: SegmentChunk
    bytes: int
    """As the allocator counts them: rounded up, and whole where it does not split what it has."""
    cause: str


@dataclass(frozen=True)
class MemoryEvent:
    """A block comes or goes."""

    block: Allocation
    comes: bool
    moment: str
    """What the rank was doing."""


@dataclass
class Ledger:
    """All blocks in the order in which they came and went."""

    allocator: Allocator = field(default_factory=Allocator)
    events: list[MemoryEvent] = field(default_factory=list)
    moment: str = "build"

    def allocate(self, size: int, cause: str, stream: int = 0) -> Allocation | None:
        """Nothing is allocated for a tensor without elements."""
        if not size:
            return None
        chunk = self.allocator.allocate(size, stream)
        block = Allocation(chunk, chunk.size, cause)
        self.events.append(MemoryEvent(block, True, self.moment))
        return block

    def free(self, block: Allocation | None) -> None:
        if block is not None:
            self.allocator.release(block.chunk)
            self.events.append(MemoryEvent(block, False, self.moment))

    def pass_by(self, size: int, cause: str) -> None:
        """What a kernel takes while it runs."""
        self.free(self.allocate(size, cause))

    def peaks(self, since: int = 0) -> dict[str, Counter[str]]:
        """For each moment from the event `since` on, bytes by cause when most was held."""
        ends = self._ends(since)
        causes: Counter[str] = Counter()
        found, wanted = {}, {end: moment for moment, end in ends.items()}
        for index, event in enumerate(self.events):
            causes[event.block.cause] += event.block.bytes if event.comes else -event.block.bytes
            if index in wanted:
                found[wanted[index]] = Counter(causes)
        return found

    def _ends(self, since: int) -> dict[str, int]:
        """By moment, the event after which most was held."""
        held = 0
        most: dict[str, int] = {}
        ends: dict[str, int] = {}
        for index, event in enumerate(self.events):
            held += event.block.bytes if event.comes else -event.block.bytes
            if index >= since and held > most.get(event.moment, -1):
                most[event.moment], ends[event.moment] = held, index
        return ends
