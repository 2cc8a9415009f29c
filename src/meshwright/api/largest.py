"""The largest micro-batch and batch that run under each strategy.

A trace of the whole model, with a model of the allocator on a device of that capacity, tells whether a size runs. It
takes seconds, so the search starts where the account, which takes milliseconds, leads to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwright import schedules
from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.errors import BadInput, MeshwrightError, Refused
from meshwright.facts.cluster import Cluster
from meshwright.facts.largest import Larger, LargestReport, LargestSizes, Limit
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.account import capacity, usable
from meshwright.planner.border import MOST, largest_that, settle
from meshwright.planner.crossings import kind_of
from meshwright.planner.memory import in_flight
from meshwright.planner.search import best_of_each_kind, choose, consider, with_traces
from meshwright.planner.step_layout import lay_out_step
from meshwright.strategies.pipeline.sizes import BUSY
from meshwright.units import GIB

Tell = Callable[[str], None]


def check_named(strategies: Sequence[str]) -> None:
    """Raise if a strategy names the micro-batch that is to be found."""
    for text in strategies:
        strategy = Strategy.parse(text)
        if strategy.micro_batch is not None:
            raise BadInput(
                f"--largest finds the micro-batch, but {text} names one; write {replace(strategy, micro_batch=None)}."
            )


def find_largest(
    planner: Planner,
    cluster: Cluster,
    options: PlanOptions,
    *,
    name: str = "job",
    started: float | None = None,
    tell: Tell = lambda words: None,
) -> LargestReport:
    """The largest sizes under the named strategies, or under the best plan of each kind.

    `tell` is called with a sentence before each part of the work. Steps are traced unless `options.fast`.
    """
    started, advice = started or time.perf_counter(), options.fitted
    strategies = [Strategy.parse(text) for text in options.strategies]
    if not strategies:
        strategies, why_none = _best(planner, cluster, options)
        advice = (*advice, *why_none)
    finder = _Finder(planner, cluster, traced=not options.fast, tell=tell)
    return LargestReport(
        job=name,
        cluster=str(cluster),
        room=finder.room,
        results=tuple(finder.sizes(strategy) for strategy in strategies),
        seconds=time.perf_counter() - started,
        advice=advice,
    )


def _best(planner: Planner, cluster: Cluster, options: PlanOptions) -> tuple[list[Strategy], tuple[str, ...]]:
    """The best strategy of each kind, without its micro-batch size; or advice if nothing fits."""
    found = planner.search(cluster, options)
    context = planner.context(cluster)
    plans = choose(context, best_of_each_kind(context, found.plans, kind_of))[: options.listed]
    strategies = dict.fromkeys(replace(plan.strategy, micro_batch=None) for plan in plans)
    return list(strategies), () if plans else planner.advise(cluster, options, found)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The step whose samples are varied."""

    strategy: Strategy
    """Resolved, without a micro-batch size."""
    micro_batches: int
    """Of one data rank."""
    cut: bool
    """Whether the batch is cut into micro-batches of a named size."""

    def batch(self, samples: int) -> int:
        return samples * self.micro_batches * self.strategy.data_ranks

    def of(self, samples: int) -> Strategy:
        """The strategy with this number of samples in a micro-batch."""
        if not self.cut:
            return self.strategy
        # With many devices, `mb` counts the samples of the process.
        devices = self.strategy.data_ranks if self.strategy.traits.many_devices else 1
        return replace(self.strategy, micro_batch=samples * devices)


class _Finder:
    """Finds the largest sizes of one job on one cluster."""

    def __init__(self, planner: Planner, cluster: Cluster, *, traced: bool, tell: Tell) -> None:
        self._planner, self._cluster, self._traced, self._tell = planner, cluster, traced, tell
        self._context = planner.context(cluster)
        hardware = self._context.hardware
        self.room = capacity(hardware, cluster.devices) if traced else usable(hardware)
        """Bytes that a size may reserve."""
        self._untraceable: set[str] = set()

    def sizes(self, named: Strategy) -> LargestSizes:
        """What fits under one strategy, or why nothing does."""
        self._tell(f"{named}: forecasting")
        self._planner.measure_for(named)
        try:
            strategy = named.resolve(self._cluster.devices)
            steps, notes = _steps(strategy, self._planner.facts)
        except MeshwrightError as error:
            return LargestSizes(strategy=str(named), reason=str(error))
        limits: dict[str, Limit] = {}
        reasons: dict[str, str] = {}
        for what, step in steps.items():
            try:
                limits[what] = self._limit(step, notes, near=limits.get("batch"))
            except MeshwrightError as error:
                reasons[what] = str(error)
                break  # what does not run with one micro-batch does not run with several
        if limits and reasons:
            notes.append(f"Without accumulating only: {reasons['micro_batch']}")
        return LargestSizes(
            strategy=str(strategy),
            # If nothing accumulates, a rank has its whole part of the batch in flight.
            micro_batch=limits.get("micro_batch", limits.get("batch")),
            batch=limits.get("batch"),
            reason="" if limits else next(iter(reasons.values())),
            notes=tuple(notes),
        )

    def _limit(self, step: _Step, notes: list[str], near: Limit | None) -> Limit:
        """The largest size of a step; `Refused` if it cannot run or one sample does not fit.

        `near` is what fits with fewer micro-batches: a better start than the account.
        """
        known: dict[int, Plan] = {}
        returns: dict[int, int] = {}

        def excess(samples: int) -> float:
            known[samples], returns[samples] = plan, _ = self._forecast(step, samples, notes)
            beyond = plan.forecast.peak - self.room
            return beyond if plan.fits or beyond > 0 else 1.0

        start = near.samples if near else max(1, largest_that(lambda size: self._account(step, size).fits))
        each = self._account(step, start + 1).forecast.peak - self._account(step, start).forecast.peak
        samples, more = settle(excess, start, each)
        if not samples:
            raise Refused(f"A micro-batch of one sample {known[1].why[0]}")
        return Limit(
            samples=samples,
            global_batch=step.batch(samples),
            plan=replace(known[samples], why=()),
            larger=_larger(more, known[more]) if more <= MOST else None,
            returns=returns[samples],
        )

    def _account(self, step: _Step, samples: int, *, timed: bool = False) -> Plan:
        context = replace(self._context, global_batch=step.batch(samples))
        return consider(context, step.of(samples), time_all=timed)

    def _forecast(self, step: _Step, samples: int, notes: list[str]) -> tuple[Plan, int]:
        """The traced forecast, or the account if the step cannot be traced, as a note says then.

        Beside it, how often the allocator returns memory in a step.
        """
        plan = self._account(step, samples, timed=True)
        lacks_host_memory = not plan.fits and plan.forecast.peak <= usable(self._context.hardware)
        if not self._traced or lacks_host_memory or str(step.strategy) in self._untraceable:
            return plan, 0
        from meshwright.tracing import trace_roles  # slow import that the account does not need

        self._tell(f"{step.strategy}: tracing {samples} sample{'s' * (samples > 1)} in a micro-batch")
        job, strategy = replace(self._planner.job, global_batch=step.batch(samples)), step.of(samples)
        try:
            traces = trace_roles(
                job, self._planner.facts, strategy, self._cluster.devices, whole=True, capacity=self.room
            )
        except MeshwrightError as error:
            self._untraceable.add(str(step.strategy))
            notes.append(f"A step could not be traced; its closed-form forecast is used: {error}")
            return plan, 0
        return with_traces(self._context, plan, traces, self.room), max(trace.returns for trace in traces)


def _steps(strategy: Strategy, facts: ModelFacts) -> tuple[dict[str, _Step], list[str]]:
    """The steps to vary: with several micro-batches and, unless the strategy is a pipeline, with one."""
    stage = strategy.stage_axis
    if stage is None or schedules.FAMILIES[stage.schedule].one_at_a_time:
        counts = {"batch": 1, "micro_batch": 2}
        return {what: _Step(strategy=strategy, micro_batches=n, cut=n > 1) for what, n in counts.items()}, []
    count, is_full = _fill(strategy, facts)
    note = f"{stage} keeps every micro-batch in flight: the size holds for {count} micro-batches a step."
    return {"micro_batch": _Step(strategy=strategy, micro_batches=count, cut=True)}, [] if is_full else [note]


def _fill(strategy: Strategy, facts: ModelFacts) -> tuple[int, bool]:
    """The smallest number of micro-batches with as many in flight as with any larger number, and whether there is one.

    A schedule without such a number gets the one that is chosen if a user names no size.
    """
    name, ranks = strategy.schedule, strategy.stage_ranks

    def flights(count: int) -> tuple[tuple[int, ...], ...]:
        return in_flight(lay_out_step(replace(strategy, micro_batch=1), facts, count * strategy.data_ranks))

    usual = schedules.micro_batches_near(name, ranks, BUSY * ranks)
    most = flights(usual)
    if flights(schedules.micro_batches_near(name, ranks, 2 * usual)) != most:
        return usual, False
    valid = (count for count in range(ranks + 1, usual) if schedules.refuse(name, ranks, count) is None)
    return next((count for count in valid if flights(count) == most), usual), True


def _larger(samples: int, plan: Plan) -> Larger:
    return Larger(samples=samples, peak_gib=plan.peak / GIB, reserved_gib=plan.forecast.peak / GIB)
