"""Measure the distinct operators of a step on this device, within bounds of memory and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from meshwright.errors import Refused, one_line
from meshwright.facts.kernel_table import MeasuredKernel
from meshwright.probe.kernel_clock import KernelClock, clock_of, kernel_seconds
from meshwright.probe.operator_inputs import CannotRun, input_bytes, make_runnable
from meshwright.runtime.memory_limit import host_memory
from meshwright.tracing.operator_calls import OperatorCall
from meshwright.units import show_bytes

SECONDS = 600.0
"""The longest that all kernels together may take. The largest come first."""
ROOM = {"cuda": 0.8, "cpu": 0.25}
"""Share of the free memory that one operator may use."""
Tell = Callable[[str], None]


@dataclass
class MeasuredCalls:
    """What was measured, and why the rest was not."""

    kernels: list[MeasuredKernel] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by signature."""


def measure_kernels(
    calls: Iterable[OperatorCall],
    device: torch.device,
    *,
    seconds: float = SECONDS,
    tell: Tell = lambda words: None,
    clock: KernelClock | None = None,
) -> MeasuredCalls:
    """Time each operator once, the largest first. An operator that cannot be run by itself is named."""
    by_signature = {call.signature: call for call in calls}
    ordered = sorted(by_signature.values(), key=lambda call: -(call.run.flops + call.run.bytes))
    clock, found, room = clock or clock_of(device), MeasuredCalls(), _room(device)
    started = time.perf_counter()
    for place, call in enumerate(ordered, start=1):
        if time.perf_counter() - started > seconds:
            found.failed[call.signature] = f"the {seconds:.0f} s for all kernels were over"
            continue
        if (needed := input_bytes(call)) > room:
            found.failed[call.signature] = f"it needs {show_bytes(needed)} of {show_bytes(room)}"
            continue
        try:
            taken = _measure(call, device, clock, by_signature)
        except (CannotRun, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            found.failed[call.signature] = one_line(error)
            if "CUDA error" in str(error):  # after a fault the process can use the device no more
                raise Refused(f"The device failed in {call.signature}: {one_line(error)}") from error
            continue
        found.kernels.append(_as_measured(call, taken))
        tell(f"kernel {place} of {len(ordered)}: {call.run.name} {taken * 1e6:,.0f} us")
    return found


def _measure(call: OperatorCall, device: torch.device, clock: KernelClock, calls: Mapping[str, OperatorCall]) -> float:
    """Seconds of a kernel. No input needs a gradient; autograd still refuses what some backward operators leave out."""
    size = int(call.run.bytes)
    try:
        with torch.enable_grad():  # recurrent layers make the workspace of their backward only then
            found = kernel_seconds(make_runnable(call, device, calls), size, clock)
    except RuntimeError:
        with torch.inference_mode():  # below autograd
            found = kernel_seconds(make_runnable(call, device, calls), size, clock)
    return max(found, 1e-9)


def _as_measured(call: OperatorCall, seconds: float) -> MeasuredKernel:
    run = call.run
    return MeasuredKernel(
        name=run.name,
        kind=run.kind,
        dtype=run.dtype,
        flops=run.flops,
        bytes=run.bytes,
        shape=run.shape,
        steps=run.steps,
        copied=run.copied,
        seconds=seconds,
        signature=call.signature,
        count=call.count,
    )


def _room(device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()
    return int(free * ROOM[device.type])
