"""Plan for a job: describe and trace it, and pass the results to the planner, which needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from meshwright.api.described_presets import describe_job
from meshwright.describe.optimizer import optimizer_name
from meshwright.errors import BadInput, JobError, MeshwrightError, one_line
from meshwright.exchange import Imported
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import LOCAL, Cluster
from meshwright.facts.compiled_blocks import CompiledBlocks
from meshwright.facts.costs import ModelCosts
from meshwright.facts.host_passes import HostPasses
from meshwright.facts.job import Job
from meshwright.facts.kernel_table import KernelTable, find_table, shipped_table
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan, Refusal
from meshwright.facts.precision import FORMATS, FULL
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.planner.account import usable
from meshwright.planner.calibrate import Calibration
from meshwright.planner.candidates import Allowed, candidates
from meshwright.planner.explain import advise
from meshwright.planner.host_costs import HOST_REFERENCE
from meshwright.planner.measured_kernels import KernelPrices
from meshwright.planner.search import PlanContext, SearchResult, search, with_traces
from meshwright.planner.stage_costs import StageCosts
from meshwright.planner.step_layout import cut_batch
from meshwright.probe.machine import local_cluster, torch_release
from meshwright.strategies import data_strategy
from meshwright.tracing.costs import measure_costs

UNSEEN = 1.15
"""What the allocator reserves for the whole model, at most, by what traces of shorter ones show (seen: up to 1.10)."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a ranking."""

    allowed: Allowed = field(default_factory=Allowed)
    strategies: tuple[str, ...] = ()
    """Evaluate only these, instead of everything that is allowed. Each is listed or refused."""
    fast: bool = False
    """Whether to skip tracing the finalists."""
    finalists: int = 3
    listed: int = 10
    global_batch: int | None = None
    """Overrides the job's global batch."""
    calibration: Calibration | None = None
    """Factors fitted to the user's own runs."""
    kernels: tuple[KernelTable, ...] = ()
    """Tables of measured kernels; that of the cluster's device is used."""
    time_host: bool = False
    """Whether the model's own Python is timed here, instead of counting a constant for each launch."""
    against: Imported | None = None
    """The user's config of another framework, to be ranked with the plans."""

    @property
    def fitted(self) -> tuple[str, ...]:
        return self.calibration.sentences() if self.calibration else ()


def open_planner(job: str, options: PlanOptions) -> Planner:
    """Make a planner for a job as written on the command line."""
    known = describe_job(job)
    batch = options.global_batch or known.job.global_batch
    return Planner(known.job, known.facts, batch, options.calibration, known.costs, options.kernels, options.time_host)


def read_cluster(text: str) -> Cluster:
    """The cluster that a text names; `local` describes this machine."""
    cluster = Cluster.parse(text)
    return local_cluster() if cluster.device == LOCAL else cluster


def read_allowed(
    *, precision: str, recompute: str, offload: str, compile: bool, tensor: bool, pipeline: bool, graphs: bool = False
) -> Allowed:
    """Parse the command line's choices; an unknown word is an error that lists the valid ones."""
    offloads = _words("offload", offload, ("none", "optimizer", "params"))
    return Allowed(
        precisions=_words("precision", precision, tuple(FORMATS)),
        recompute=_words("ac", recompute, ("none", "selective", "full")),
        offload=tuple("" if word == "none" else word for word in offloads),
        compile=(False, True) if compile else (False,),
        graphs=(False, True) if graphs else (False,),
        tensor=tensor,
        pipeline=pipeline,
    )


def _words(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    unknown = next((word for word in words if word not in known), None)
    if unknown is not None or not words:
        raise BadInput(f"--{option} {text!r}: {unknown!r} is not one of {', '.join(known)}; join several with commas.")
    return words


class Planner:
    """Plans one described job for any number of clusters and requests."""

    def __init__(
        self,
        job: Job,
        facts: ModelFacts,
        global_batch: int,
        calibration: Calibration | None = None,
        costs: dict[tuple[str, str], ModelCosts] | None = None,
        kernels: tuple[KernelTable, ...] = (),
        time_host: bool = False,
    ) -> None:
        """`costs` are traced costs by precision and activation checkpointing; new ones are added to it.

        With `kernels`, a plan takes the kernels of its device from there, and those of a CPU are traced as a CPU's.
        """
        self.job, self.facts, self.global_batch = job, facts, global_batch
        self._calibration = calibration or Calibration()
        self.notes: list[str] = []
        """What a user should know about how the plans were made."""
        self._kernels, self._times_host = kernels, time_host
        self._device = "cpu" if kernels and all(table.device == "cpu" for table in kernels) else "cuda"
        self._costs = {} if costs is None or self._device == "cpu" else costs
        self._failed: dict[str, JobError] = {}
        """Why costs could not be measured, by precision."""
        self._compiled: dict[str, CompiledBlocks] = {}
        self._passes: dict[str, HostPasses | None] = {}
        """The host's part of the model's pass by precision; None if it cannot be timed."""
        self._contexts: dict[Cluster, PlanContext] = {}

    def context(self, cluster: Cluster) -> PlanContext:
        if cluster not in self._contexts:
            hardware = hardware_of(cluster)
            measured = self._measured(hardware.device)
            if measured is not None and self._kernels:  # a shipped table is of another host
                hardware = replace(hardware, launch=measured.launch)
            self._contexts[cluster] = PlanContext(
                facts=self.facts,
                stage_costs=StageCosts(
                    self.facts,
                    self._costs,
                    hardware,
                    prices=KernelPrices(measured, hardware, self._optimizer) if measured else None,
                    host=lru_cache(partial(self._host, measured)),
                    compiled=self._compiled,
                ),
                cluster=cluster,
                hardware=hardware,
                global_batch=self.global_batch,
                calibration=self._calibration,
            )
        return self._contexts[cluster]

    def _measured(self, device: str) -> KernelTable | None:
        """The measured kernels of a device: the given ones, or those that ship with the package, or None."""
        if not self._kernels:
            return shipped_table(device)
        found = find_table(self._kernels, device, torch_release())
        if found is not None and found.torch != torch_release():
            note = f"Kernels were measured with torch {found.torch}; this is torch {torch_release()}."
            self.notes += [] if note in self.notes else [note]
        return found

    def _host(self, measured: KernelTable | None, precision: str) -> HostPasses | None:
        """The model's own pass on the cluster's host; None if launches are counted instead."""
        if not self._times_host and (measured is None or not measured.host):
            return None
        if precision not in self._passes:
            self._passes[precision] = self._time_passes(precision)
        passes = self._passes[precision]
        reference = measured.host if measured is not None and measured.host else HOST_REFERENCE
        return None if passes is None else passes.at(reference)

    def _time_passes(self, precision: str) -> HostPasses | None:
        from meshwright.tracing.host_passes import time_host_passes  # needed only here

        try:
            return time_host_passes(self.job, self.facts, precision)
        except MeshwrightError as error:
            note = f"{error} A constant for each launch is used instead."
            self.notes += [] if note in self.notes else [note]
            return None

    @cached_property
    def _optimizer(self) -> str:
        return optimizer_name(self.job)

    def search(self, cluster: Cluster, options: PlanOptions) -> SearchResult:
        """Evaluate every allowed strategy, or only the named ones."""
        if options.strategies:
            return self.search_named(cluster, [Strategy.parse(text) for text in options.strategies])
        allowed = replace(options.allowed, precisions=self._measurable(options.allowed))
        for precision in allowed.precisions if any(allowed.compile) else ():
            self.measure_compiled(precision, apart=cluster.devices > 1)
        found = candidates(self.facts, cluster, self.global_batch, allowed)
        return search(self.context(cluster), found, losses=allowed.loss)

    def _measurable(self, allowed: Allowed) -> tuple[str, ...]:
        """The allowed precisions in which the model's costs can be measured; an error if there is none."""
        found = []
        for precision in allowed.precisions:
            try:
                for recompute in allowed.recompute:
                    self.measure(precision, recompute)
                found.append(precision)
            except JobError as error:
                self.notes.append(f"Nothing is planned in {precision}. {error}")
        if found:
            return tuple(found)
        raise JobError(f"{self._failed[allowed.precisions[0]]}{self._other_precision(allowed)}")

    def _other_precision(self, allowed: Allowed) -> str:
        """Advice for a model that runs in fp32 only."""
        if FULL.word in allowed.precisions:
            return ""
        try:
            self.measure(FULL.word, "none")
        except JobError:
            return ""
        return f" In {FULL.word} they can be: plan with --precision {FULL.word}."

    def search_named(self, cluster: Cluster, strategies: Sequence[Strategy]) -> SearchResult:
        """Evaluate exactly these strategies."""
        measured, refused = list(strategies), []
        for strategy in strategies:
            try:
                self.measure_for(strategy)
            except JobError as error:
                measured.remove(strategy)
                refused.append(Refusal(strategy=str(strategy), reason=str(error)))
                if not measured:
                    raise
        found = search(self.context(cluster), measured, time_all=True, shortcuts=False)
        found.refused += refused
        found.candidates += len(refused)
        return found

    def measure_for(self, strategy: Strategy) -> None:
        """Make sure that the costs are known that a strategy's account needs."""
        self.measure(strategy.precision, strategy.recompute)
        if strategy.compile:
            apart = bool(strategy.stage_axis) or data_strategy(strategy).compiles_blocks(strategy)
            self.measure_compiled(strategy.precision, apart=apart)

    def measure_compiled(self, precision: str, *, apart: bool) -> None:
        """Make sure that it is known what compiling makes of blocks; what cannot be traced counts as eager.

        `apart`: also if each is compiled by itself.
        """
        if self._device == "cpu":
            return
        from meshwright.tracing import compiled_blocks  # slow import that other plans do not need

        costs = self._costs[precision, "none"]
        try:
            if precision not in self._compiled:
                self._compiled[precision] = compiled_blocks.measure_compiled_blocks(self.job, self.facts, costs)
            found = self._compiled[precision]
            if apart and found.kept_apart is None:
                found = compiled_blocks.measure_blocks_apart(self.job, self.facts, costs, found)
                self._compiled[precision] = found
        except Exception as error:  # also of the model's own code, which plain plans do not run compiled
            found = self._compiled.get(precision, CompiledBlocks())
            self._compiled[precision] = replace(found, kept_apart=1.0)
            reason = str(error) if isinstance(error, MeshwrightError) else one_line(error)
            self.notes.append(f"The compiled model could not be traced; it is counted as an eager one: {reason}")

    def measure(self, precision: str, recompute: str) -> None:
        """Make sure that costs are known under a policy; each precision is traced once."""
        if precision in self._failed:
            raise self._failed[precision]
        if (precision, "none") not in self._costs:
            try:
                self._costs[precision, "none"] = measure_costs(self.job, self.facts, precision, device=self._device)
            except JobError as error:
                self._failed[precision] = error
                raise
        self._costs.setdefault((precision, recompute), self._costs[precision, "none"].recomputed(recompute))

    def traced(self, cluster: Cluster, plan: Plan) -> Plan:
        """The plan with the memory of a traced step. One that cannot be traced stays as it is, and a note says so."""
        found = self.roughly_traced(cluster, plan)
        return self.decided(cluster, found) if found.is_open else found

    def roughly_traced(self, cluster: Cluster, plan: Plan) -> Plan:
        """The same by traces of models with fewer blocks, which may leave open whether the plan fits."""
        return self._traced(cluster, plan, whole=False)

    def decided(self, cluster: Cluster, plan: Plan) -> Plan:
        """An open plan with the memory of a traced step of the whole model, which takes several times as long."""
        return self._traced(cluster, plan, whole=True)

    def _traced(self, cluster: Cluster, plan: Plan, *, whole: bool) -> Plan:
        from meshwright.tracing import trace_roles  # slow import that plans without traces do not need

        context, job = self.context(cluster), self.short_job(plan.strategy)
        try:
            traces = trace_roles(job, self.facts, plan.strategy, cluster.devices, whole=whole)
        except MeshwrightError as error:
            self.notes.append(f"{plan.strategy} could not be traced; its closed-form forecast is kept: {error}")
            return replace(plan, is_open=False)
        found = with_traces(context, plan, traces)
        if whole or not _leave_open(traces, usable(context.hardware)):
            return replace(found, is_open=False)
        return replace(found, is_open=True, error_bar={**found.error_bar, "memory": UNSEEN - 1})

    def short_job(self, strategy: Strategy) -> Job:
        """The job with the smallest batch that fills the strategy: a larger one needs no more memory."""
        if strategy.stage_axis and strategy.micro_batch is None:  # its micro-batches would be smaller
            return replace(self.job, global_batch=self.global_batch)
        size, count = cut_batch(strategy, self.global_batch)
        enough = min(count, strategy.stage_ranks + 1)
        return replace(self.job, global_batch=size * enough * strategy.data_ranks)

    def advise(self, cluster: Cluster, options: PlanOptions, found: SearchResult) -> tuple[str, ...]:
        """Suggest changes that would make the job fit."""
        tightest = min(found.unfit, key=lambda plan: plan.forecast.peak, default=None)
        offloaded = {"recompute": ("full",), "offload": ("optimizer",)}
        tries: list[tuple[str, Callable[[], Plan | None]]] = [
            ("Full activation checkpointing (--ac full)", partial(self._first, cluster, options, recompute=("full",))),
            ("Offloading the optimizer (--offload optimizer)", partial(self._first, cluster, options, **offloaded)),
        ]
        for times in (2, 4, 8):
            larger = replace(cluster, nodes=cluster.nodes * times)
            tries.append((f"{times} times the nodes", partial(self._first, larger, options)))
        return advise(tightest, usable(self.context(cluster).hardware), tries)

    def _first(self, cluster: Cluster, options: PlanOptions, **changes: Any) -> Plan | None:
        wider = replace(options, strategies=(), allowed=replace(options.allowed, **changes))
        plans = self.search(cluster, wider).plans
        return plans[0] if plans else None


def _leave_open(traces: list[Trace], room: float) -> bool:
    """Whether traces of shorter models do not tell if the whole one fits into `room` bytes."""
    return max(trace.peak for trace in traces) <= room < UNSEEN * max(trace.reserved for trace in traces)
