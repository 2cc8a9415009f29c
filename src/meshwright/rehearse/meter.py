"""Measure a rank's memory while it takes steps: by the allocator's counters on a GPU, by its storages on a CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf

import torch

from meshwright.assemble.step import Trainer
from meshwright.facts.rehearsal import Moment
from meshwright.runtime.measure import REST, held_states
from meshwright.tracing.allocator import Allocator, SegmentChunk
from meshwright.tracing.memory import Allocation, Ledger
from meshwright.tracing.record_step import tell_held
from meshwright.tracing.recorder import StepRecorder
from meshwright.tracing.step_counts import Messages


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment at which a rank held most."""

    allocated: int = 0
    reserved: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    moment: Moment = field(default_factory=Moment)
    retries: int = 0


class LimitExceeded(torch.OutOfMemoryError):
    """A rank holds more bytes than its limit. Like a GPU's error, it ends the step."""


class MemoryMeter(ABC):
    """What a rank holds. `enter` is told what the rank does."""

    def __init__(self) -> None:
        self.moment = Moment()
        self.wanted = 0
        """Bytes of the request that exceeded the limit."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context of building the trainer and of the steps whose memory is measured."""
        with nullcontext():
            yield

    @abstractmethod
    def enter(self, moment: Moment) -> None:
        """Called when the rank goes on to another phase or module."""

    @abstractmethod
    def tell_held(self, trainer: Trainer) -> None:
        """Called when gradients and the optimizer's state are complete."""

    @abstractmethod
    def begin(self, trainer: Trainer) -> None:
        """Forget earlier peaks: from now on the rank is warm."""

    @abstractmethod
    def peak(self) -> Peak:
        """The peak since `begin`."""

    @abstractmethod
    def at_the_end(self) -> Peak:
        """What was held when memory ran out."""


class CudaMeter(MemoryMeter):
    """The caching allocator's counters. They tell states from the rest, but not what the rest is."""

    def __init__(self, device: torch.device, limit: int | None) -> None:
        super().__init__()
        self._device = device
        self._trainer: Trainer | None = None
        if limit is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        self._most = Peak()
        self._reserved = 0

    def enter(self, moment: Moment) -> None:
        self._close()
        self.moment = moment

    def tell_held(self, trainer: Trainer) -> None:
        self._trainer = trainer  # states are counted when they are asked for

    def begin(self, trainer: Trainer) -> None:
        self._close()
        self._trainer, self._most = trainer, Peak()

    def peak(self) -> Peak:
        self._close()
        return self._most

    def at_the_end(self) -> Peak:
        # The highest mark of this moment: part of it is freed while the error is handled.
        highest, reserved = torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        return self._noted(highest, max(self._reserved, reserved))

    def _close(self) -> None:
        """Note the peak of the moment that ends, if it is the highest."""
        highest = torch.cuda.max_memory_allocated(self._device)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        if highest > self._most.allocated:
            self._most = self._noted(highest, self._reserved)
        else:
            self._most = replace(self._most, reserved=self._reserved)

    def _noted(self, allocated: int, reserved: int) -> Peak:
        states = {} if self._trainer is None else dict(held_states(self._trainer).memory)
        if self._trainer is not None and self._trainer.host is not None:
            states.pop("optimizer")  # on the host
        return Peak(
            allocated=allocated,
            reserved=reserved,
            memory={**states, REST: max(0, allocated - sum(states.values()))},
            moment=self.moment,
            retries=torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0),
        )


class CountingAllocator(Allocator):
    """Counts bytes as they are requested: a CPU's allocator neither rounds nor caches."""

    def allocate(self, size: int, stream: int = 0) -> SegmentChunk:
        if self.allocated + size > self.capacity:
            raise LimitExceeded(f"{self.allocated + size} bytes exceed the limit of {int(self.capacity)}")
        self.allocated += size
        return SegmentChunk(0, size, (False, stream), free=False)

    def release(self, chunk: SegmentChunk) -> None:
        self.allocated -= chunk.size


class WatchedLedger(Ledger):
    """A ledger that remembers the request with which its allocator ran out."""

    wanted = 0
    events_then = 0

    def allocate(self, size: int, cause: str, stream: int = 0) -> Allocation | None:
        try:
            return super().allocate(size, cause, stream)
        except LimitExceeded:
            if not self.wanted:
                self.wanted, self.events_then = size, len(self.events)
            raise


class StorageMeter(MemoryMeter):
    """All storages that operators make, with their causes, from the first of the model to the last of a step."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._ledger = WatchedLedger(allocator=CountingAllocator(capacity=inf if limit is None else limit))
        self._recorder = StepRecorder(Messages(), self._ledger, workspaces=False)
        self._moments: dict[str, Moment] = {}
        self._since = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self._recorder.recording():
            yield

    def enter(self, moment: Moment) -> None:
        self.moment = self._moments[str(moment)] = moment
        self._recorder.phase = moment.phase if moment.phase in ("build", "update") else "forward_backward"
        self._recorder.at(str(moment))

    def tell_held(self, trainer: Trainer) -> None:
        tell_held(trainer, self._recorder)

    def begin(self, trainer: Trainer) -> None:
        self._since = self._recorder.begin()

    def peak(self) -> Peak:
        peaks = self._ledger.peaks(self._since)
        name = max(peaks, key=lambda moment: peaks[moment].total(), default="")
        if not name:
            return Peak()
        memory = {cause: size for cause, size in peaks[name].items() if size}
        return Peak(allocated=sum(memory.values()), memory=memory, moment=self._moments.get(name, Moment()))

    def at_the_end(self) -> Peak:
        held: Counter[str] = Counter()
        for event in self._ledger.events[: self._ledger.events_then]:
            held[event.block.cause] += event.block.bytes if event.is_allocation else -event.block.bytes
        memory = {cause: size for cause, size in held.items() if size}
        self.wanted = self._ledger.wanted
        return Peak(allocated=sum(memory.values()), memory=memory, moment=self.moment)


def meter_for(device: torch.device, limit: int | None) -> MemoryMeter:
    return CudaMeter(device, limit) if device.type == "cuda" else StorageMeter(limit)
