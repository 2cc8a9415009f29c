"""A ledger of all allocations and releases, with their causes and peaks, and workspaces that operators do not show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from meshwright.describe.flops import operator_kind
from meshwright.tracing.allocator import Allocator, SegmentChunk
from meshwright.tracing.workspaces import operator_workspaces

CUBLAS = 32 << 20
"""Bytes of PyTorch's workspace for each cuBLAS handle on Hopper (the default; 8.1 MiB on older GPUs)."""


@dataclass(eq=False)
class Allocation:
    """One allocation. Its cause may be corrected later."""

    chunk: SegmentChunk
    bytes: int
    """As the allocator counts them: rounded up, and the whole block if it does not split it."""
    cause: str


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation or a release."""

    block: Allocation
    is_allocation: bool
    moment: str
    """What the rank was doing."""


@dataclass
class Ledger:
    """All allocations and releases in order."""

    allocator: Allocator = field(default_factory=Allocator)
    events: list[MemoryEvent] = field(default_factory=list)
    moment: str = "build"

    def allocate(self, size: int, cause: str, stream: int = 0) -> Allocation | None:
        """Allocate memory; None for a tensor without elements."""
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

    def peaks(self, since: int = 0) -> dict[str, Counter[str]]:
        """For each moment from event `since` on, bytes by cause at that moment's peak."""
        ends = self._ends(since)
        causes: Counter[str] = Counter()
        found, wanted = {}, {end: moment for moment, end in ends.items()}
        for index, event in enumerate(self.events):
            causes[event.block.cause] += event.block.bytes if event.is_allocation else -event.block.bytes
            if index in wanted:
                found[wanted[index]] = Counter(causes)
        return found

    def _ends(self, since: int) -> dict[str, int]:
        """By moment, the event after which most memory was held."""
        held = 0
        most: dict[str, int] = {}
        ends: dict[str, int] = {}
        for index, event in enumerate(self.events):
            held += event.block.bytes if event.is_allocation else -event.block.bytes
            if index >= since and held > most.get(event.moment, -1):
                most[event.moment], ends[event.moment] = held, index
        return ends


class Workspaces:
    """Memory of the libraries' own: cuBLAS's, one for each of two threads, and those of single operators."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._allocated: set[bool] = set()

    def note(self, func: Any, args: Any, found: Any, phase: str) -> None:
        """Allocate what an operator takes besides its results, and free what is not kept."""
        for held in operator_workspaces(func, args, found):
            for block in [self._ledger.allocate(size, "temporary") for size in held]:
                self._ledger.free(block)
        thread = phase == "backward"
        if operator_kind(func) == "matmul" and thread not in self._allocated:
            self._allocated.add(thread)
            self._ledger.allocate(CUBLAS, "temporary")
