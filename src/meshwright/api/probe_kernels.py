"""`meshwright probe --kernels`: trace a job's steps, time their operators on this device, and keep them in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.api.job_planner import Planner, PlanOptions, open_planner
from meshwright.describe.optimizer import optimizer_name
from meshwright.errors import BadInput, OutputError
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.kernel_table import KernelTable, MeasuredUpdate, add_table, read_tables, write_tables
from meshwright.facts.strategy import Strategy
from meshwright.planner.step_layout import lay_out_step
from meshwright.probe.device import measure_launch
from meshwright.probe.engine_step import engine_step_seconds
from meshwright.probe.kernel_clock import KernelClock
from meshwright.probe.machine import local_cluster, machine_words, torch_release
from meshwright.probe.measure_kernels import SECONDS, MeasuredCalls, measure_kernels
from meshwright.runtime.place import choose_device, known_device
from meshwright.tracing.host_passes import time_reference
from meshwright.tracing.operator_calls import OperatorCall, StepCalls, step_calls

OUT = Path("kernels.json")
USUAL = {"cuda": "single,bf16", "cpu": "single"}
"""The strategy whose kernels are measured if none is named."""
SHOWN = 10
"""Kernels that take most of the step, in the document."""
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """Arguments of `meshwright probe --kernels`."""

    job: str
    strategies: tuple[str, ...] = ()
    world: int = 1
    """Ranks of the fake world that steps are traced in."""
    device: str | None = None
    out: Path = OUT
    batch: int | None = None
    seconds: float = SECONDS
    """The longest that all kernels together may take."""
    tell: Tell = field(default=lambda words: print(f"probe: {words}", file=sys.stderr, flush=True))


def probe_kernels(request: KernelRequest) -> dict[str, Any]:
    """Measure what the file does not have yet, write it, and return the document of `--json`."""
    _refuse(request)
    device = torch.device(choose_device(known_device(request.device)))
    strategies = [Strategy.parse(text) for text in request.strategies or (USUAL[device.type],)]
    tables = read_tables(request.out) if request.out.exists() else ()
    started = time.perf_counter()
    with redirect_stdout(sys.stderr):
        planner = open_planner(request.job, PlanOptions(global_batch=request.batch))
        table = describe_device(device)
        known = next((one for one in tables if one.key == table.key), table)
        table, calls, found = measured_table(
            planner,
            strategies,
            device,
            table,
            world=request.world,
            known=known,
            seconds=request.seconds,
            tell=request.tell,
        )
    write_tables(request.out, add_table(tables, table))
    return {
        **{name: getattr(table, name) for name in ("device", "machine", "torch", "threads", "launch", "host", "step")},
        "job": request.job,
        "strategies": [str(strategy) for strategy in strategies],
        "operators": len(calls),
        "measured": len(found.kernels),
        "known": len(calls) - len(found.kernels) - len(found.failed),
        "failed": [{"operator": name, "reason": reason} for name, reason in found.failed.items()],
        "longest": longest_kernels(known.merged(table), calls),
        "out": str(request.out),
        "seconds": time.perf_counter() - started,
    }


def describe_device(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> KernelTable:
    """A table without kernels: the device, and how fast its host is."""
    return KernelTable(
        device=hardware_of(local_cluster(device.type, devices=1)).device,
        machine=machine_words(device),
        torch=torch_release(),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        launch=measure_launch(device),
        host=time_reference(),
        step=engine_step_seconds(device, clock),
    )


def measured_table(
    planner: Planner,
    strategies: Sequence[Strategy],
    device: torch.device,
    table: KernelTable,
    *,
    world: int = 1,
    known: KernelTable | None = None,
    seconds: float = SECONDS,
    tell: Tell = lambda words: None,
    clock: KernelClock | None = None,
    steps: Sequence[StepCalls] = (),
) -> tuple[KernelTable, dict[str, OperatorCall], MeasuredCalls]:
    """The table with the kernels of all strategies, their distinct operators, and what was measured now.

    What `known` has is not measured again. `steps` are the strategies' steps, if they were traced before.
    """
    steps = steps or [trace_operators(planner, strategy, device.type, world, tell) for strategy in strategies]
    calls = {call.signature: call for step in steps for call in step.calls}
    before = known or table
    have = {kernel.signature for kernel in before.kernels}
    new = [call for signature, call in calls.items() if signature not in have]
    found = measure_kernels(new, device, seconds=seconds, tell=tell, clock=clock)
    table = replace(table, kernels=tuple(found.kernels))
    taken = {kernel.signature: kernel.seconds for kernel in before.merged(table).kernels}
    updates = [
        update
        for strategy, step in zip(strategies, steps, strict=True)
        if (update := _update(planner, strategy.resolve(world), step, taken))
    ]
    return replace(table, updates=tuple(updates)), calls, found


def trace_operators(
    planner: Planner, strategy: Strategy, device: str, world: int, tell: Tell, *, rank: int = 0
) -> StepCalls:
    """The operators of one rank's step. Ranks of other pipeline stages have others."""
    tell(f"tracing {strategy}")
    job = replace(planner.job, global_batch=planner.global_batch)
    return step_calls(job, planner.facts, strategy.resolve(world), ranks=world, rank=rank, device=device)


def _update(planner: Planner, strategy: Strategy, step: StepCalls, seconds: dict[str, float]) -> MeasuredUpdate | None:
    """The sum of the update's kernels; None if one of them was not measured."""
    own = [(call.signature, call.counts["update"]) for call in step.calls if "update" in call.counts]
    if not own or any(signature not in seconds for signature, _ in own):
        return None
    layout = lay_out_step(strategy, planner.facts, planner.global_batch)
    # Gathered parameters are shards between steps; ZeRO's optimizers hold shards of whole ones.
    elements = step.elements / (1 if layout.gathers else layout.optimizer_over)
    total = sum(seconds[signature] * count for signature, count in own)
    return MeasuredUpdate(optimizer=optimizer_name(planner.job), elements=elements, seconds=total)


def longest_kernels(table: KernelTable, calls: dict[str, OperatorCall], shown: int = SHOWN) -> list[dict[str, Any]]:
    """The kernels that take most of a step."""
    own = [kernel for kernel in table.kernels if kernel.signature in calls]
    ordered = sorted(own, key=lambda kernel: -kernel.seconds * calls[kernel.signature].count)
    return [
        {"operator": k.signature, "count": calls[k.signature].count, "ms": k.seconds * 1e3} for k in ordered[:shown]
    ]


def _refuse(request: KernelRequest) -> None:
    out = request.out
    if out.suffix != ".json" or not out.parent.is_dir():
        raise OutputError(f"--out {str(out)!r} must be a .json file in an existing folder, such as {OUT}.")
    if request.world < 1:
        raise BadInput(f"--world {request.world} has no ranks; give 1 or more.")
