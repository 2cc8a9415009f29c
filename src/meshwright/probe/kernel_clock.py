"""Time one kernel alone, by events on a GPU and by the clock on a CPU; other data pass through the caches before."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch

REPEATS, BUDGET = 15, 0.15
"""The most timed runs of a kernel, and seconds after which no further one starts."""
LEAST = 3
"""Timed runs at least, unless one takes longer than the budget."""
CACHES = {"cuda": 2**27, "cpu": 2**22}
"""Bytes that are written between two runs at most, as other operators do in a step: on a GPU more than its cache holds,
on a CPU more than a core's own caches."""
WRITES = 6
"""How often a GPU writes them: 0.4 ms on an H200, in which a busy host launches an operator, also through autograd."""
BETWEEN = 4
"""How many times an operator's bytes other operators write on a CPU before it runs: its neighbours are about as large.
What small operators need stays in the caches."""


class KernelClock(Protocol):
    """Times one run of a kernel."""

    def once(self, run: Callable[[], Any], size: int) -> float:
        """Seconds of one run of an operator that touches `size` bytes."""


def kernel_seconds(run: Callable[[], Any], size: int, clock: KernelClock, budget: float = BUDGET) -> float:
    """The median of several runs, after a first one that is not counted."""
    once = clock.once(run, size)  # it plans, compiles and allocates
    if once > budget:
        return min(once, clock.once(run, size))
    found: list[float] = []
    spent = 0.0
    while len(found) < REPEATS and (spent < budget or len(found) < LEAST):
        found.append(clock.once(run, size))
        spent += found[-1]
    return median(found)


def clock_of(device: torch.device) -> KernelClock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


class CpuClock:
    """Times by a clock of the host."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._other = clock, torch.zeros(CACHES["cpu"], dtype=torch.uint8)

    def once(self, run: Callable[[], Any], size: int) -> float:
        self._other[: BETWEEN * size].add_(1)
        start = self._clock()
        found = run()
        seconds = self._clock() - start
        del found  # freeing is the next operator's
        return seconds


class CudaClock:
    """Times by events on the device."""

    def __init__(self, device: torch.device) -> None:
        self._other = torch.zeros(CACHES["cuda"], dtype=torch.uint8, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._between = median(self._time(lambda: None) for _ in range(REPEATS))  # of two events after each other

    def once(self, run: Callable[[], Any], size: int) -> float:
        return max(0.0, self._time(run) - self._between)

    def _time(self, run: Callable[[], Any]) -> float:
        # Writing takes longer than launching what follows, so the device does not wait for the host between events.
        for _ in range(WRITES):
            self._other.add_(1)
        self._start.record()
        run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3
