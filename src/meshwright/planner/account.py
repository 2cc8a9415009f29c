"""Closed-form forecasts of memory and time from a model's costs, fast enough for thousands of candidates per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.facts.forecast import Forecast
from meshwright.facts.hardware import Hardware
from meshwright.planner.memory import forecast_memory
from meshwright.planner.stage_costs import StageCosts, held_twice
from meshwright.planner.step_layout import StepLayout
from meshwright.planner.time import Timing, forecast_time
from meshwright.units import GIB

CONTEXT, CONTEXT_ALONE = 1.2 * GIB, 0.75 * GIB
"""Bytes that a CUDA process uses besides tensors: its context, loaded kernels and, unless it is alone, NCCL's buffers.
One process on an H200 could reserve all but this (docs/data/largest_gpu.json)."""
HOST_AHEAD = 1.2
"""Gathered inputs that streams hold in a pipeline whose host runs ahead, relative to those that backward needs. The
tensors that wait to be scattered are included (published sweep: 1.0 to 1.9)."""
HELD_WHILE_STALLED = 0.13
"""The same where each message between stages stalls: by the time a host goes on, streams have returned nearly all of it
(published sweep on 16 to 64 nodes: 0.05 to 0.3)."""
HELD_IN_ONE, HELD_IN_ONE_OF_STAGES = 0.6, 0.8
"""The same in a step of one micro-batch, without and with a pipeline: no earlier one left anything to the streams, and
no host waits for a message of another (published sweep: 0.4 to 1.0)."""
RETURNING = 0.02
"""Seconds per GiB that an allocator returns to the device and asks for again (published sweep, tensor axes that need
more than there is: 0.02 to 0.11)."""
MARGIN = 0.025
"""Share of a device's memory that a caching allocator loses to fragmentation."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """Forecast of one step: memory of the ranks, and time."""

    ranks: tuple[Forecast, ...]
    """Memory by cause of each pipeline rank; of a long pipeline, only the ranks that can be the fullest."""
    fullest: int
    """Index in `ranks` of the rank with the highest peak."""
    timing: Timing
    """Empty if the time was not requested."""

    @property
    def forecast(self) -> Forecast:
        """Memory of the fullest rank, and the step's time."""
        return Forecast(memory=self.ranks[self.fullest].memory, time=self.timing.parts)

    @property
    def places(self) -> tuple[Forecast, ...]:
        """For each pipeline rank: memory by cause and, if every rank is known, its busy seconds."""
        if len(self.ranks) != len(self.timing.busy):
            return self.ranks if len(self.ranks) > 1 else ()
        return tuple(
            Forecast(memory=rank.memory, time={"busy": seconds + self.timing.waits})
            for rank, seconds in zip(self.ranks, self.timing.busy, strict=True)
        )

    @property
    def reserved(self) -> int:
        """Bytes that the fullest rank's allocator holds."""
        return self.ranks[self.fullest].peak

    def fits(self, hardware: Hardware) -> bool:
        return self.reserved <= usable(hardware)


def capacity(hardware: Hardware, ranks: int) -> float:
    """Bytes that an allocator can reserve on a device until requests fail."""
    if hardware.device == "cpu":
        return float(hardware.memory)
    return hardware.memory - (CONTEXT if ranks > 1 else CONTEXT_ALONE)


def usable(hardware: Hardware) -> float:
    """Bytes of a device that a plan may use."""
    if hardware.device == "cpu":
        return float(hardware.memory)
    return hardware.memory * (1 - MARGIN) - CONTEXT


def account(
    step_layout: StepLayout,
    stage_costs: StageCosts,
    hardware: Hardware,
    per_node: int,
    *,
    worth_timing: Callable[[Forecast], bool] = lambda memory: True,
) -> Account:
    """Memory and time of a step layout; `Refused` if the model cannot be cut into its stages.

    `worth_timing` decides from the fullest rank's memory whether the time is computed.
    """
    timing = forecast_time(step_layout, stage_costs, hardware, per_node) if step_layout.elastic else Timing()
    held = _held_by_streams(step_layout, timing, per_node) if step_layout.elastic else 1.0
    ranks = forecast_memory(step_layout, stage_costs, gathered=held)
    # In a pipeline, gathered inputs belong to micro-batches in flight: streams do not return them in time.
    returns = step_layout.elastic and step_layout.stage_ranks == 1
    if returns and max(rank.peak for rank in ranks) > usable(hardware):
        full, ranks = ranks, _squeezed(step_layout, stage_costs, ranks, usable(hardware))
        returned = max(rank.peak for rank in full) - max(rank.peak for rank in ranks)
        timing.add("host", step_layout.micro_batches * RETURNING * returned / GIB)
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
    if not step_layout.elastic and worth_timing(ranks[fullest]):
        timing = forecast_time(step_layout, stage_costs, hardware, per_node)
    return Account(ranks=tuple(ranks), fullest=fullest, timing=timing)


def _held_by_streams(step_layout: StepLayout, timing: Timing, per_node: int) -> float:
    """Gathered inputs that streams hold, relative to those that backward needs; waiting hosts raise it."""
    if timing.stalled:
        return HELD_WHILE_STALLED
    alone, far = step_layout.micro_batches == 1, step_layout.ranks > per_node
    if step_layout.stage_ranks == 1:
        return HELD_IN_ONE if alone and far else 1.0
    if far and (timing.stalls or step_layout.inner_ranks > per_node):
        return max(HELD_IN_ONE_OF_STAGES * alone, held_twice(step_layout))
    return HOST_AHEAD


def _squeezed(step_layout: StepLayout, stage_costs: StageCosts, ranks: list[Forecast], room: float) -> list[Forecast]:
    """Memory under pressure: streams return the gathered inputs that backward does not need."""
    least = forecast_memory(step_layout, stage_costs, gathered=0.0)
    if max(rank.peak for rank in least) > room:
        return ranks
    held = []
    for full, small in zip(ranks, least, strict=True):
        spare = max(0.0, (min(full.peak, room) - small.peak) / 2)
        held.append(Forecast(memory={**small.memory, "activations": round(small.memory["activations"] + spare)}))
    return held
