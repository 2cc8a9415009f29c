"""Where a step's time goes on one GPU: kernels by kind and by name, the host, and time without a kernel."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Step = Callable[[], Any]
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "products": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "splitK", "mm_"),
    "update": ("adam", "multi_tensor", "foreach"),
    "compiled": ("triton",),
    "copies": ("Memcpy", "Memset", "copy", "CatArray", "fill"),
    "reductions": ("reduce", "norm", "softmax", "SoftMax"),
}


@dataclass(frozen=True)
class Profile:
    """Milliseconds of one step."""

    wall: float
    host: float
    """Until the host had launched everything."""
    kernels: dict[str, tuple[int, float]]
    """Number and milliseconds by name."""

    @property
    def busy(self) -> float:
        return sum(ms for _, ms in self.kernels.values())

    @property
    def launches(self) -> int:
        return sum(count for count, _ in self.kernels.values())

    def by_kind(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for name, (_, ms) in self.kernels.items():
            found[next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "other")] += ms
        return {kind: round(found[kind], 2) for kind in (*KINDS, "other")}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_and_wall(step: Step) -> tuple[float, float]:
    """Milliseconds until a step returned, and until the device was done."""
    wait()
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    wait()
    return host * 1e3, (time.perf_counter() - start) * 1e3


def profile_step(step: Step) -> Profile:
    """Profile one step; its times are measured on another one, because a profiled step is slower."""
    host, wall = host_and_wall(step)
    if not torch.cuda.is_available():
        return Profile(wall, host, {})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = {one.key: (one.count, one.self_device_time_total / 1e3) for one in profile.key_averages()}
    return Profile(wall, host, {name: found for name, found in events.items() if found[1] > 0})


def differences(one: Profile, other: Profile, most: int = 12) -> list[str]:
    """Kernels whose time differs most between two steps."""
    names = {*one.kernels, *other.kernels}
    apart = {name: other.kernels.get(name, (0, 0.0))[1] - one.kernels.get(name, (0, 0.0))[1] for name in names}
    return [
        f"{apart[name]:+8.2f} ms  {one.kernels.get(name, (0, 0))[0]:5d} -> {other.kernels.get(name, (0, 0))[0]:5d}  "
        f"{name[:110]}"
        for name in sorted(names, key=lambda name: -abs(apart[name]))[:most]
    ]
