"""Forecast timelines of pipelines: simulate a schedule with the stages' forecast times.

    forecast_timeline(planner.context(cluster), strategy)

The ranking uses a closed form; this simulation reaches the same step time, with every wait traced to a dependency.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from meshwright.compare.timeline import KINDS
from meshwright.errors import Refused
from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import DATA, SEND, UPDATE, Piece, Timeline, with_idle
from meshwright.planner.calibrate import Calibration
from meshwright.planner.search import PlanContext
from meshwright.planner.site import Site
from meshwright.planner.stage_pass import stage_passes
from meshwright.planner.step_layout import StepLayout, lay_out_step
from meshwright.planner.time import forecast_time
from meshwright.schedules import Action, Kind, Schedule, TimedAction, make, simulate

LARGEST = 20_000
"""The largest schedule, in actions, that is still simulated."""

Parts = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Seconds by cause for one micro-batch on one stage."""

    forward: Parts
    backward: Parts

    @property
    def weight_share(self) -> float:
        """Share of backward spent on weight gradients: a matmul's weight gradient costs as much as its forward pass.

        Recomputation comes before the input gradients, so with activation checkpointing this is a third rather than a
        half.
        """
        backward = sum(self.backward.values())
        return min(0.5, sum(self.forward.values()) / backward) if backward else 0.5

    def parts(self, kind: Kind) -> Parts:
        """Seconds by cause for one action; causes that take no time are left out."""
        share = {Kind.BACKWARD_INPUT: 1 - self.weight_share, Kind.BACKWARD_WEIGHT: self.weight_share}.get(kind, 1.0)
        whole = self.forward if kind is Kind.FORWARD else self.backward
        return {cause: seconds * share for cause, seconds in whole.items() if seconds}

    def seconds(self, kind: Kind) -> float:
        return sum(self.parts(kind).values())


@dataclass(frozen=True, kw_only=True)
class _Around:
    """Seconds that a step spends outside the schedule."""

    send: float
    """Seconds for sending an activation or gradient to the next stage."""
    data: Parts
    update: Parts


def first_timeline(context: PlanContext, plans: Iterable[Plan], *, largest: int = LARGEST) -> Timeline | None:
    """Timeline of the first pipelined plan with at most `largest` actions, or None."""
    for plan in plans:
        if plan.strategy.stage_axis and count_actions(context, plan.strategy) <= largest:
            return forecast_timeline(context, plan.strategy)
    return None


def count_actions(context: PlanContext, strategy: Strategy) -> int:
    """Forward and backward passes of one step on all ranks of a pipeline."""
    step_layout = lay_out_step(strategy, context.facts, context.global_batch)
    return 2 * step_layout.stages * step_layout.micro_batches


def forecast_timeline(context: PlanContext, strategy: Strategy) -> Timeline:
    """Timeline of one step under a resolved strategy; `Refused` if it has no pipeline."""
    if not strategy.stage_axis:
        raise Refused(f"{strategy} has no pipeline, so it has no timeline; choose a strategy with pp=N.")
    step_layout = lay_out_step(strategy, context.facts, context.global_batch)
    stages, around = _seconds(context, step_layout)
    schedule = make(step_layout.schedule, step_layout.stage_ranks, step_layout.micro_batches)
    played = simulate(
        schedule,
        forward=[stage.seconds(Kind.FORWARD) for stage in stages],
        backward_input=[stage.seconds(Kind.BACKWARD_INPUT) for stage in stages],
        backward_weight=[stage.seconds(Kind.BACKWARD_WEIGHT) for stage in stages],
        send=around.send,
    )
    pieces = [*_passes(schedule, played.spans, stages, around.send), *_ending(played.spans, around)]
    return Timeline(
        strategy=str(strategy),
        schedule=step_layout.schedule,
        ranks=step_layout.stage_ranks,
        micro_batches=step_layout.micro_batches,
        pieces=with_idle(pieces, step_layout.stage_ranks),
    )


def _seconds(context: PlanContext, step_layout: StepLayout) -> tuple[list[_Stage], _Around]:
    hardware, per_node = context.hardware, context.cluster.devices_per_node
    stages = context.stage_costs.of(step_layout)
    site = Site(
        hardware=hardware,
        per_node=per_node,
        step_layout=step_layout,
        collective=context.stage_costs.collective,
        prices=context.stage_costs.prices,
    )
    timing = forecast_time(step_layout, context.stage_costs, hardware, per_node)
    step = {**timing.parts, "host": timing.waits}
    largest = max(stage.output for stage in stages[:-1])
    send = _fitted(context.calibration, {"stages": site.time("send", largest, site.neighbour)})
    around = _Around(
        send=send["stages"],
        data=_fitted(context.calibration, _only(step, "data")),
        update=_fitted(context.calibration, _only(step, "update", "host copies", "host")),
    )
    passes = [[_fitted(context.calibration, part.parts) for part in stage_passes(site, stage)] for stage in stages]
    return [_Stage(forward=forward, backward=backward) for forward, backward in passes], around


def _only(parts: Parts, *causes: str) -> Parts:
    return {cause: parts[cause] for cause in causes if parts.get(cause)}


def _fitted(calibration: Calibration, parts: Parts) -> Parts:
    return calibration.apply(Forecast(time=parts)).time


def _passes(
    schedule: Schedule, spans: tuple[tuple[TimedAction, ...], ...], stages: list[_Stage], send: float
) -> Iterator[Piece]:
    """A piece for every action, and for the message that it sends."""
    for span in (span for row in spans for span in row):
        action = span.action
        piece = partial(Piece, rank=span.rank, stage=action.stage, micro_batch=action.micro_batch)
        parts = stages[action.stage].parts(action.kind)
        yield piece(kind=KINDS[action.kind], start=span.start, end=span.end, parts=parts)
        to = _receiver(schedule, action)
        if send and to is not None and to != span.rank:
            yield piece(kind=SEND, start=span.end, end=span.end + send, to=to)


def _receiver(schedule: Schedule, action: Action) -> int | None:
    """The rank that waits for an action's result, if any."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    return schedule.rank_of(stage) if 0 <= stage < schedule.stages else None


def _ending(spans: tuple[tuple[TimedAction, ...], ...], around: _Around) -> Iterator[Piece]:
    """A rank reduces its gradients when it is done; the update waits for all ranks, because clipping does."""
    sums, updates = sum(around.data.values()), sum(around.update.values())
    meet = max(row[-1].end for row in spans) + sums
    for rank, row in enumerate(spans):
        if sums:
            yield Piece(rank=rank, kind=DATA, start=row[-1].end, end=row[-1].end + sums, parts=around.data)
        if updates:
            yield Piece(rank=rank, kind=UPDATE, start=meet, end=meet + updates, parts=around.update)
