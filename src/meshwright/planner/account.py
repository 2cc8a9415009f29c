"""The quick grade of forecast: closed form over a model's costs, thousands of candidates a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.facts.forecast import Forecast
from meshwright.facts.hardware import Hardware
from meshwright.facts.plan import GIB
from meshwright.planner.memory import forecast_memory
from meshwright.planner.stage_costs import StageCosts, held_twice
from meshwright.planner.step_layout import StepLayout
from meshwright.planner.time import Timing, forecast_time

CONTEXT = 1.2 * GIB
"""What a CUDA process takes of its device beside tensors: its context, and workspaces of cuBLAS and NCCL."""
AHEAD = 1.2
"""Gathered inputs that streams hold in a pipeline whose host runs ahead, by those that backward needs: what is to be
scattered waits there too (published sweep: 1.0 to 1.9)."""
MARGIN = 0.025
"""The share of a device's memory that a caching allocator cannot put to use in the end."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one step would take."""

    ranks: tuple[Forecast, ...]
    """Memory by cause of one rank of each place in a pipeline; of a long one, of those that can be the fullest."""
    fullest: int
    """Which of these ranks holds most."""
    timing: Timing
    """Empty where nobody asked for it."""

    @property
    def forecast(self) -> Forecast:
        """Of the fullest rank."""
        return Forecast(memory=self.ranks[self.fullest].memory, time=self.timing.parts)

    @property
    def places(self) -> tuple[Forecast, ...]:
        """Of each place in a pipeline: memory by cause and, where all are known, how long it is busy."""
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

    @property
    def peak(self) -> int:
        """Bytes allocated on the fullest rank."""
        return allocated(self.ranks[self.fullest])

    def fits(self, hardware: Hardware) -> bool:
        return self.reserved <= usable(hardware)


def usable(hardware: Hardware) -> float:
    """Bytes of a device that tensors can have."""
    if hardware.device == "cpu":
        return float(hardware.memory)
    return hardware.memory * (1 - MARGIN) - CONTEXT


def allocated(forecast: Forecast) -> int:
    return forecast.peak - forecast.memory.get("allocator", 0)


def account(
    step_layout: StepLayout,
    stage_costs: StageCosts,
    hardware: Hardware,
    per_node: int,
    *,
    worth_timing: Callable[[Forecast], bool] = lambda memory: True,
) -> Account:
    """Memory and time of a step layout; raises `Refused` where the model cannot be cut so.

    `worth_timing` is told the fullest rank's memory, and says whether the time is asked for.
    """
    timing = forecast_time(step_layout, stage_costs, hardware, per_node) if step_layout.elastic else Timing()
    held = _held_by_streams(step_layout, timing, per_node) if step_layout.elastic else 1.0
    ranks = forecast_memory(step_layout, stage_costs, gathered=held)
    if step_layout.elastic and max(rank.peak for rank in ranks) > usable(hardware):
        ranks = _squeezed(step_layout, stage_costs, ranks, usable(hardware))
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
    if not step_layout.elastic and worth_timing(ranks[fullest]):
        timing = forecast_time(step_layout, stage_costs, hardware, per_node)
    return Account(ranks=tuple(ranks), fullest=fullest, timing=timing)


def _held_by_streams(step_layout: StepLayout, timing: Timing, per_node: int) -> float:
    """Gathered inputs that streams hold, by those that backward needs: the more, the more they wait."""
    far = step_layout.stage_ranks > 1 and step_layout.ranks > per_node
    if far and (timing.stalls or step_layout.inner_ranks > per_node):
        return held_twice(step_layout)
    return AHEAD if step_layout.stage_ranks > 1 else 1.0


def _squeezed(step_layout: StepLayout, stage_costs: StageCosts, ranks: list[Forecast], room: float) -> list[Forecast]:
    """What is held where memory is short: streams give back what they only had not returned yet, and not more."""
    least = forecast_memory(step_layout, stage_costs, gathered=0.0)
    if max(rank.peak for rank in least) > room:
        return ranks
    held = []
    for full, small in zip(ranks, least, strict=True):
        spare = max(0.0, (min(full.peak, room) - small.peak) / 2)
        held.append(Forecast(memory={**small.memory, "activations": round(small.memory["activations"] + spare)}))
    return held
