"""A model of PyTorch's CUDA caching allocator: what it would hold for the same sequence of requests.

Rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp with its default settings. A request is rounded up to 512
bytes and served from the smallest free block of its pool and stream that is large enough. The block is split if enough
is left over. Free neighbours are merged. Only if the device has no memory left, segments that are free as a whole are
returned to it, in all pools, and the request is tried once more. A block that is not split counts as allocated in full,
so `torch.cuda.max_memory_allocated()` is more than the sum of the requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

MIB = 1 << 20
ROUNDING = 512
SMALL = MIB
"""The largest request that is served from the pool of small blocks."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
"""Requests of at least this size get a separate segment, if no free block is large enough."""
OWN_ROUNDING = 2 * MIB


@dataclass(eq=False)
class SegmentChunk:
    """A part of a segment."""

    address: int
    size: int
    pool: tuple[bool, int]
    """Whether it serves small requests, and its stream."""
    free: bool = True
    before: SegmentChunk | None = None
    after: SegmentChunk | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass
class Allocator:
    """The segments that are reserved on the device, divided into chunks."""

    capacity: float = inf
    """Bytes that the device has. If it needs more, the allocator goes on as if it had more."""
    reserved: int = 0
    """The most bytes that were reserved at a time; more than the capacity if a request could not be met."""
    allocated: int = 0
    returns: int = 0
    """How often segments had to be returned to the device."""
    _held: int = 0
    """Bytes that are reserved now."""
    _end: int = 0
    """The next address."""
    _free: dict[tuple[bool, int], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By pool: sizes and addresses of free chunks, smallest first."""
    _chunks: dict[int, SegmentChunk] = field(default_factory=dict)
    """By address."""

    def allocate(self, size: int, stream: int = 0) -> SegmentChunk:
        """Serve a request. The chunk may be larger than requested."""
        size = max(ROUNDING, round_up(size, ROUNDING))
        pool = size <= SMALL, stream
        chunk = self._best_fit(size, pool) or self._new_segment(size, pool)
        left = chunk.size - size
        if left >= ROUNDING if pool[0] else left > SMALL:
            self._split(chunk, size)
        chunk.free = False
        self.allocated += chunk.size
        return chunk

    def release(self, chunk: SegmentChunk) -> None:
        """Free a chunk and merge it with its free neighbours."""
        self.allocated -= chunk.size
        chunk.free = True
        if chunk.after is not None and chunk.after.free:
            self._take(chunk.after)
            self._join(chunk, chunk.after)
        if chunk.before is not None and chunk.before.free:
            self._take(chunk.before)
            chunk = chunk.before
            assert chunk.after is not None
            self._join(chunk, chunk.after)
        insort(self._free[chunk.pool], chunk.key)

    def _best_fit(self, size: int, pool: tuple[bool, int]) -> SegmentChunk | None:
        chunks = self._free[pool]
        place = bisect_left(chunks, (size, -1))
        return self._chunks[chunks.pop(place)[1]] if place < len(chunks) else None

    def _new_segment(self, size: int, pool: tuple[bool, int]) -> SegmentChunk:
        if size <= SMALL:
            length = SMALL_SEGMENT
        else:
            length = LARGE_SEGMENT if size < OWN_SEGMENT else round_up(size, OWN_ROUNDING)
        if self._held + length > self.capacity:
            self._return_segments()
        chunk = SegmentChunk(self._end, length, pool)
        self._chunks[chunk.address] = chunk
        self._end += length
        self._held += length
        self.reserved = max(self.reserved, self._held)
        return chunk

    def _return_segments(self) -> None:
        """Return all segments to the device that are free as a whole."""
        self.returns += 1
        for pool, chunks in self._free.items():
            kept = []
            for key in chunks:
                chunk = self._chunks[key[1]]
                if chunk.before is None and chunk.after is None:
                    self._held -= chunk.size
                    del self._chunks[chunk.address]
                else:
                    kept.append(key)
            self._free[pool] = kept

    def _split(self, chunk: SegmentChunk, size: int) -> None:
        rest = SegmentChunk(chunk.address + size, chunk.size - size, chunk.pool, before=chunk, after=chunk.after)
        if rest.after is not None:
            rest.after.before = rest
        chunk.size, chunk.after = size, rest
        self._chunks[rest.address] = rest
        insort(self._free[rest.pool], rest.key)

    def _join(self, chunk: SegmentChunk, after: SegmentChunk) -> None:
        chunk.size += after.size
        chunk.after = after.after
        if chunk.after is not None:
            chunk.after.before = chunk
        del self._chunks[after.address]

    def _take(self, chunk: SegmentChunk) -> None:
        chunks = self._free[chunk.pool]
        del chunks[bisect_left(chunks, chunk.key)]


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
