"""Evaluate candidates: refuse those that cannot run, forecast the rest, and rank those that fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.errors import MeshwrightError, Refused
from meshwright.facts.cluster import Cluster
from meshwright.facts.forecast import Forecast
from meshwright.facts.hardware import Hardware
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan, Refusal, Speed
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.planner.account import Account, account, usable
from meshwright.planner.calibrate import Calibration
from meshwright.planner.candidates import complexity
from meshwright.planner.error_bars import Scope, expected_error, model_of, scope_of
from meshwright.planner.kernels import peak_flops
from meshwright.planner.measured_kernels import KernelSeconds
from meshwright.planner.pieced import PiecedCopies
from meshwright.planner.stage_costs import StageCosts
from meshwright.planner.step_layout import StepLayout, lay_out_step
from meshwright.strategies import Place, data_strategy, model_axis
from meshwright.strategies.float8 import refuse_float8_axes
from meshwright.strategies.graphs import refuse_cut_losses, refuse_graphs
from meshwright.strategies.inside_data import refuse_inside_data
from meshwright.strategies.moved_state import refuse_moved
from meshwright.strategies.pieced_loss import refuse_pieced
from meshwright.units import GIB

TIE = 0.05
"""Plans whose times differ by less than this share count as equally fast: of published pairs of runs that a forecast
put this near to each other, it named the faster one in 58 % (docs/planner.md)."""
ROOM = 0.93
"""Share of a device's memory up to which a plan fits safely, considering the error of forecasts."""


MEASURED_BAR = 0.142
"""The bar of time by measured kernels: 96 of 128 steps of blind rounds on an H200 are within it (`kernels` in
docs/data/unseen_scores.json). Eight of nine models on a CPU are too (docs/data/kernel_grade.json,
kernel_grade_held_out.json)."""
MOSTLY = 0.5
"""Share of the kernels' time that must be measured, not interpolated, for that bar. The table that ships knows other
models' kernels; its times have the usual bars."""


@dataclass
class SearchResult:
    """Plans that fit, plans that do not, and every refusal with its reason."""

    plans: list[Plan] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    unfit: list[Plan] = field(default_factory=list)
    candidates: int = 0


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """The model, cluster and costs that plans are made for."""

    facts: ModelFacts
    stage_costs: StageCosts
    cluster: Cluster
    hardware: Hardware
    global_batch: int
    calibration: Calibration = field(default_factory=Calibration)

    @cached_property
    def place(self) -> Place:
        device = "cpu" if self.hardware.device == "cpu" else "cuda"
        per_node = self.cluster.devices_per_node
        return Place(device=device, devices=per_node, ranks=self.cluster.devices, local_ranks=per_node)


def search(
    context: PlanContext,
    candidates: Iterable[Strategy],
    *,
    time_all: bool = False,
    shortcuts: bool = True,
    losses: tuple[str, ...] = ("whole",),
) -> SearchResult:
    """Evaluate every candidate, and sort those that fit by step time.

    With `time_all`, candidates that do not fit get a step time too. With `shortcuts`, a candidate that an earlier one
    rules out is refused without being evaluated. Candidates get a `pieced` copy where logits take much memory.
    """
    found, known, copies = SearchResult(), _Known(), PiecedCopies(context.facts.head, safe_room(context))
    for candidate in copies.added_to(candidates, losses):
        found.candidates += 1
        if shortcuts and (reason := known.rules_out(candidate)):
            found.refused.append(Refusal(strategy=str(candidate), reason=reason))
            continue
        try:
            plan = consider(context, candidate, time_all=time_all)
        except MeshwrightError as error:
            known.cannot(candidate, str(error))
            found.refused.append(Refusal(strategy=str(candidate), reason=str(error)))
            continue
        known.considered(candidate, fits=plan.fits)
        copies.seen(plan)
        if plan.fits:
            found.plans.append(plan)
        else:
            found.unfit.append(plan)
            found.refused.append(Refusal(strategy=str(candidate), reason=plan.why[0]))
    found.plans.sort(key=lambda plan: plan.forecast.step)
    return found


class _Known:
    """What earlier candidates imply for later ones: memory grows with the micro-batch; offloading never saves time."""

    def __init__(self) -> None:
        self._full: dict[tuple[object, ...], int] = {}
        self._fits: set[tuple[object, ...]] = set()
        self._refused: dict[tuple[object, ...], str] = {}

    def rules_out(self, candidate: Strategy) -> str:
        """Why a candidate need not be evaluated; empty if it must be."""
        size = candidate.micro_batch or 0
        smallest = self._full.get(_policies(candidate))
        if smallest is not None and size >= smallest:
            return f"does not fit with mb={smallest} either"
        if candidate.offload and (*_axes(candidate), candidate.recompute, candidate.sync, size) in self._fits:
            return "fits without offloading, which is faster"
        return self._refused.get((*_axes(candidate), size), "")

    def considered(self, candidate: Strategy, *, fits: bool) -> None:
        size = candidate.micro_batch or 0
        if fits:
            self._fits.add((*_axes(candidate), candidate.recompute, candidate.sync, size))
        elif candidate.micro_batch is not None:
            self._full.setdefault(_policies(candidate), size)

    def cannot(self, candidate: Strategy, reason: str) -> None:
        self._refused.setdefault((*_axes(candidate), candidate.micro_batch or 0), reason)


def _axes(s: Strategy) -> tuple[object, ...]:
    data = s.data, s.data_size, s.variant, s.hsdp_replicas
    return *data, s.axes, s.precision, s.pure, s.autocast, s.reduce, s.compile, s.graphs, s.loss


def _policies(s: Strategy) -> tuple[object, ...]:
    return *_axes(s), s.recompute, s.offload, s.sync


def consider(context: PlanContext, candidate: Strategy, *, time_all: bool = True) -> Plan:
    """The plan of one strategy, or `Refused`. Without `time_all`, the time is forecast only if the plan fits."""
    strategy = candidate.resolve(context.cluster.devices)
    if reason := refuse(context, strategy):
        raise Refused(reason)
    step_layout = lay_out_step(strategy, context.facts, context.global_batch)
    found = account(
        step_layout,
        context.stage_costs,
        context.hardware,
        context.cluster.devices_per_node,
        worth_timing=lambda memory: time_all or context.calibration.apply(memory).peak <= usable(context.hardware),
    )
    return _plan(context, strategy, step_layout, found)


def refuse(context: PlanContext, strategy: Strategy) -> str | None:
    """Why the engine would not run a strategy, or None."""
    facts = context.facts
    if strategy.precision not in context.hardware.flops:
        able = [word for word in FORMATS if word in context.hardware.flops]
        return f"{context.hardware.device} has no units for {strategy.precision}; use {' or '.join(able)}."
    if strategy.autocast:
        return (
            f"{strategy.precision}:autocast can be trained, but its memory and time are not forecast: PyTorch chooses "
            f"each operator's dtype as it runs; plan for {strategy.precision} and expect more memory."
        )
    reason = refuse_float8_axes(strategy) or refuse_graphs(strategy, facts) or refuse_pieced(facts, strategy)
    if reason := reason or data_strategy(strategy).refuse(strategy, facts, context.place):
        return reason
    if reason := refuse_inside_data(strategy):
        return reason
    for term in strategy.inner_axes:
        if reason := model_axis(term).refuse(term, strategy, facts, context.global_batch):
            return reason
    pieces = context.global_batch // strategy.data_ranks // (strategy.micro_batch or context.global_batch)
    if reason := refuse_moved(strategy, facts, max(1, pieces)) or refuse_cut_losses(
        strategy, facts, strategy.data_ranks * max(1, pieces)
    ):
        return reason
    if stage := strategy.stage_axis:
        return model_axis(stage).refuse(stage, strategy, facts, context.global_batch)
    if facts.batch_norms and strategy.micro_batch not in (None, context.global_batch // strategy.data_ranks):
        return f"BatchNorm ({facts.batch_norms[0]}) normalises over a micro-batch, and cutting the batch changes that."
    return None


def _plan(context: PlanContext, strategy: Strategy, step_layout: StepLayout, found: Account) -> Plan:
    room, host = usable(context.hardware), _host_gib(context, step_layout)
    forecast = context.calibration.apply(found.forecast)
    why = _too_large(forecast, room)
    if not why and host > context.hardware.host_memory / GIB:
        why = (f"needs {host:.0f} of {context.hardware.host_memory / GIB:.0f} GiB of a node's host memory",)
    shares = _kernel_shares(context, step_layout) if forecast.time else {}
    expected = expected_error("account", _scope(context, strategy))
    written = (forecast.memory.get("parameters", 0) + forecast.memory.get("optimizer", 0)) / GIB
    return Plan(
        strategy=strategy,
        forecast=forecast,
        fits=not why,
        why=why,
        speed=_speed(context, step_layout, forecast.step) if forecast.time else Speed(),
        error_bar={**expected.bar, **_measured_bar(shares)},
        kernels=shares,
        untested=expected.untested,
        stages=found.places,
        host_gib=host,
        saving_gib=written / max(1, step_layout.reduced // max(step_layout.shards, 1)),
    )


def _measured_bar(shares: Mapping[str, float]) -> dict[str, float]:
    """The bar of time by measured kernels, if most of the time is theirs."""
    return {"time": MEASURED_BAR} if shares.get("exact", 0) >= MOSTLY else {}


def _kernel_shares(context: PlanContext, step_layout: StepLayout) -> dict[str, float]:
    """Shares of the kernels' time, forward and backward, by where it comes from; empty without measured kernels."""
    if context.stage_costs.prices is None:
        return {}
    stages = context.stage_costs.of(step_layout)
    found = sum((unit.kernels * times for stage in stages for unit, times in stage.counted), KernelSeconds())
    return found.shares()


def _too_large(forecast: Forecast, room: float) -> tuple[str, ...]:
    """The reason that memory does not suffice, with the two largest causes; empty if it does."""
    if forecast.peak <= room:
        return ()
    parts = sorted(forecast.memory.items(), key=lambda part: -part[1])[:2]
    largest = " and ".join(f"{size / GIB:.1f} GiB of {cause}" for cause, size in parts)
    return (f"needs {forecast.peak / GIB:.1f} of {room / GIB:.1f} GiB: {largest}",)


def _speed(context: PlanContext, step_layout: StepLayout, step: float) -> Speed:
    tokens = context.facts.weight_per_sample
    devices = context.cluster.devices
    flops = context.stage_costs.model_flops(step_layout.precision) * context.global_batch
    return Speed(
        samples_per_s=context.global_batch / step,
        tokens_per_s_per_device=context.global_batch * tokens / step / devices if tokens and tokens > 1 else None,
        mfu=flops / (step * devices * peak_flops(context.hardware, step_layout.precision)),
    )


def _host_gib(context: PlanContext, step_layout: StepLayout) -> float:
    """Host memory per node that holds offloaded state."""
    if not step_layout.offload:
        return 0.0
    stages = context.stage_costs.of(step_layout)
    fullest = max(stages, key=lambda stage: stage.trainable)
    elements = step_layout.per_rank(fullest.trainable, fullest.inside, step_layout.optimizer_over)
    each = step_layout.moment_bytes + step_layout.master_bytes + step_layout.gradient_bytes
    return elements * each * context.cluster.devices_per_node / GIB


def _combination(s: Strategy) -> Hashable:
    """The axes of a strategy with their sizes, its precision, and the dtype in which it reduces."""
    return s.data, s.variant, s.hsdp_replicas, s.axes, s.precision, s.reduce


def best_of_each_kind(
    context: PlanContext, plans: list[Plan], kind_of: Callable[[Strategy], Hashable] = _combination
) -> list[Plan]:
    """One plan of each combination of axes, so that a ranking does not list fifty micro-batch sizes of one."""
    kinds: dict[Hashable, list[Plan]] = {}
    for plan in plans:
        kinds.setdefault(kind_of(plan.strategy), []).append(plan)
    return sorted((_preferred(context, alike) for alike in kinds.values()), key=lambda plan: plan.forecast.step)


def choose(context: PlanContext, plans: list[Plan]) -> list[Plan]:
    """The plans, fastest first, except that the preferred one leads."""
    if not plans:
        return []
    first = _preferred(context, plans)
    return [first, *(plan for plan in plans if plan is not first)]


def _preferred(context: PlanContext, plans: list[Plan]) -> Plan:
    """Of the plans that tie with the fastest, one that fits safely, and the least complex of those."""
    fastest, enough = min(plan.forecast.step for plan in plans), safe_room(context)
    ties = [plan for plan in plans if plan.forecast.step <= fastest * (1 + TIE)]
    return min(ties, key=lambda plan: (plan.forecast.peak > enough, complexity(plan.strategy), plan.forecast.step))


def safe_room(context: PlanContext) -> float:
    """Bytes of a device up to which a plan fits safely."""
    return ROOM * usable(context.hardware)


def _scope(context: PlanContext, strategy: Strategy) -> Scope:
    return scope_of(strategy.axes, context.cluster, model_of(context.facts))


def with_traces(context: PlanContext, plan: Plan, traces: list[Trace], room: float | None = None) -> Plan:
    """The plan with the memory of a step traced on fake tensors. `room` is what it may reserve, if not the usual."""
    fullest = max(traces, key=lambda trace: trace.reserved)
    memory = {**fullest.memory, "allocator": max(0, fullest.reserved - fullest.peak)}
    forecast = Forecast(memory=memory, time=plan.forecast.time)
    room = usable(context.hardware) if room is None else room
    fits = fullest.reserved <= room
    bar = expected_error("trace", _scope(context, plan.strategy)).bar
    return replace(
        plan,
        forecast=forecast,
        fits=fits,
        why=plan.why if fits else _too_large(forecast, room),
        grade="trace",
        error_bar={**bar, **({"time": plan.error_bar["time"]} if plan.kernels else {})},
        stages=tuple(Forecast(memory=trace.memory) for trace in traces) if len(traces) > 1 else (),
    )
