"""Closed-form forecasts of memory and time from a model's costs, fast enough for thousands of candidates per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.facts.forecast import Forecast
from meshwright.facts.hardware import Hardware
from meshwright.planner.memory import SLACK, forecast_memory
from meshwright.planner.stage_costs import StageCosts, held_twice
from meshwright.planner.step_layout import StepLayout
from meshwright.planner.time import Timing, forecast_time
from meshwright.units import GIB

CONTEXT, CONTEXT_ALONE = 1.2 * GIB, 0.75 * GIB
"""Bytes that a CUDA process uses besides tensors: its context, loaded kernels and, unless it is alone, NCCL's buffers.
One process on an H200 could reserve all but this (docs/data/largest_gpu.json)."""
PENDING = 50
"""Gathered inputs that wait for other streams to return them, if the host runs ahead of its device: it is ahead by what
the device queues, whatever the model and its stages (published sweep: about 46 in decoders of 16 blocks and 51 of 28,
with 2 to 32 tensor ranks and 1 to 16 stages; of these the larger tells better who fits)."""
IN_USE = 4.5
"""The same if the host waits for messages: the inputs and outputs of the collectives under way (published sweep: 2 to 6
in pipelines of two stages, and wherever messages between stages stall)."""
LATE = 0.1
"""Share of a pipeline's step that devices wait for hosts, from which on no host is ahead: the late host of a collective
is another rank's (published sweep: with 0.02 to 0.09, hosts are ahead)."""
HELD_IN_ONE, HELD_UNTIL_FULL = 0.75, 1.0
"""Gathered inputs that streams hold, relative to those of a rank's blocks and micro-batches in flight, in a step of one
micro-batch and in a pipeline that is never full: no earlier micro-batch left any to the streams (published sweep: 0.4
to 1.1, and 0.5 to 2)."""
HELD_BY_DEVICE = 0.5
"""The same if a device without a pipeline waits for its host (published sweep: 0 to 1)."""
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
    ranks = forecast_memory(step_layout, stage_costs)
    if step_layout.elastic and step_layout.recompute == "none":
        least, most = forecast_memory(step_layout, stage_costs, gathered=0.0), ranks
        share, one = _held_share(step_layout, timing, per_node), stage_costs.stream(step_layout)
        ranks = [_held_by_streams(*each, share, one) for each in zip(least, most, strict=True)]
        # In a pipeline, gathered inputs belong to micro-batches in flight: streams do not return them in time.
        if step_layout.stage_ranks == 1 and ranks[0].peak > usable(hardware):
            ranks = [min(ranks[0], most[0], key=lambda rank: rank.peak)]
            full = ranks[0].peak
            ranks = [_squeezed(ranks[0], least[0], usable(hardware))]
            timing.add("host", step_layout.micro_batches * RETURNING * (full - ranks[0].peak) / GIB)
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
    if not step_layout.elastic and worth_timing(ranks[fullest]):
        timing = forecast_time(step_layout, stage_costs, hardware, per_node)
    return Account(ranks=tuple(ranks), fullest=fullest, timing=timing)


def _held_by_streams(least: Forecast, most: Forecast, share: float | None, one: float) -> Forecast:
    """A rank's memory with the gathered inputs that streams hold, each of `one` bytes.

    `least` is without any, `most` with those of all its micro-batches in flight. See `_held_share` for the share.
    """
    inputs, queued = _activations(most) - _activations(least), PENDING * one
    held = queued if share is None else min(queued, max(IN_USE * one, share * inputs))
    return _with_activations(least, held)


def _held_share(step_layout: StepLayout, timing: Timing, per_node: int) -> float | None:
    """The share of a rank's gathered inputs that streams hold; None if the host runs ahead as far as it can."""
    if timing.stalled:
        return 0.0
    far, staged = step_layout.ranks > per_node, step_layout.stage_ranks > 1
    alone = step_layout.micro_batches <= step_layout.stage_ranks
    if staged and far and (timing.waiting > LATE or step_layout.inner_ranks > per_node):
        return max(HELD_IN_ONE * (step_layout.micro_batches == 1), held_twice(step_layout))
    if alone:
        return HELD_UNTIL_FULL if staged else HELD_IN_ONE
    return HELD_BY_DEVICE if timing.waiting > 0 and not staged else None


def _activations(rank: Forecast) -> float:
    return rank.memory["activations"] + rank.memory["logits"]


def _with_activations(rank: Forecast, more: float) -> Forecast:
    memory = rank.memory
    added = {"activations": memory["activations"] + more, "allocator": memory["allocator"] + SLACK * more}
    return Forecast(memory={**memory, **{cause: round(size) for cause, size in added.items()}})


def _squeezed(rank: Forecast, least: Forecast, room: float) -> Forecast:
    """Memory under pressure: streams return the gathered inputs that backward does not need."""
    if rank.peak <= room or least.peak > room:
        return rank
    return _with_activations(least, (room - least.peak) / 2 / (1 + SLACK))
