"""Profile one step of one rank with torch.profiler: when it computes, and when it communicates.

On a CPU, PyTorch operators are computation, and what gloo records (`gloo:all_reduce`, `gloo:send`) is communication,
including the wait for a late peer. On a GPU, NCCL's kernels are communication and all others are computation.
Communication is *exposed* while nothing computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.torch_private.autograd import DeviceType

Span = tuple[float, float]
"""Start and end, in seconds since the step began."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One step of one rank. Spans of one kind are sorted by time and do not overlap."""

    seconds: float
    compute: tuple[Span, ...]
    communication: tuple[Span, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the step: computing, communicating, and communicating while nothing computes."""
        exposed = total(self.communication) - overlap(self.communication, self.compute)
        parts = {"compute": total(self.compute), "communication": total(self.communication), "exposed": exposed}
        return {name: min(1.0, seconds / self.seconds) for name, seconds in parts.items()}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_profiler(device: torch.device) -> profile:
    """A profiler of the host and the device."""
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)


def profile_step(step: Callable[[], Any], device: torch.device) -> StepProfile:
    """Take a step under the profiler. Profiling slows the step: use its shares, not its time."""
    with make_profiler(device) as profiler:
        began = time.time_ns()  # the clock of the profiler's events
        step()
        synchronize(device)
        seconds = (time.time_ns() - began) / 1e9
    spans: dict[bool, list[Span]] = {False: [], True: []}
    for event in profiler.profiler.kineto_results.events():
        if (talks := is_communication(event, on_gpu=device.type == "cuda")) is not None:
            start = (event.start_ns() - began) / 1e9
            spans[talks].append((max(0.0, start), min(seconds, start + event.duration_ns() / 1e9)))
    return StepProfile(seconds=seconds, compute=merge(spans[False]), communication=merge(spans[True]))


def is_communication(event: Any, *, on_gpu: bool) -> bool | None:
    """Whether an event is communication (True) or computation (False); None if it is neither."""
    name = event.name()
    if on_gpu:
        # Ranges that a user named also show on the GPU's timeline, over their kernels.
        is_kernel = event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
        return name.startswith("nccl") if is_kernel else None
    if name.startswith("gloo:"):
        return True
    return False if name.startswith("aten::") else None


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The union of the spans, sorted."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def overlap(one: tuple[Span, ...], other: tuple[Span, ...]) -> float:
    """Seconds in which spans of both kinds run."""
    return total(one) + total(other) - total(merge(chain(one, other)))


def coarsened(spans: tuple[Span, ...], most: int) -> tuple[Span, ...]:
    """At most `most` spans, for a picture: the smallest gaps are closed."""
    if len(spans) <= most:
        return spans
    gaps = sorted(later[0] - earlier[1] for earlier, later in pairwise(spans))
    closed = gaps[len(spans) - most - 1]
    kept = [spans[0]]
    for start, end in spans[1:]:
        if start - kept[-1][1] <= closed:
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((start, end))
    return tuple(kept)
