"""Explain a strategy on a job: one step of each distinct rank as a walk, with the trace's bytes and planner's times."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.api.described_presets import describe_job
from meshwright.api.job_planner import Planner, read_cluster
from meshwright.api.parameter_shares import side_by_side, strategy_shares
from meshwright.api.timeline import LARGEST, count_actions, forecast_timeline
from meshwright.commands.preflight import ranks_of
from meshwright.errors import MeshwrightError
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import Kernel, Size
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Message, Operation
from meshwright.facts.walk import Visit, Walk
from meshwright.planner import kernels
from meshwright.planner.collectives import RankGroup, group_on
from meshwright.planner.search import PlanContext, consider
from meshwright.planner.site import Site
from meshwright.planner.step_layout import lay_out_step
from meshwright.strategies import data_strategy, model_axis


def explain_job(job: str, strategy: str, *, ranks: int | None = None, on: str | None = None) -> dict[str, Any]:
    """`explain_strategy` for a job and a strategy as written on the command line."""
    parsed = Strategy.parse(strategy)
    cluster = read_cluster(on) if on is not None else usual_cluster(ranks_of(parsed, ranks))
    parsed.resolve(cluster.devices)  # refuses wrong sizes before the job is described
    with redirect_stdout(sys.stderr):
        known = describe_job(job)
        return explain_strategy(known.job, known.facts, parsed, cluster, name=job)


def explain_strategy(
    job: Job, facts: ModelFacts, strategy: Strategy, cluster: Cluster, *, name: str = "job"
) -> dict[str, Any]:
    """The walks of all distinct ranks of a cluster, the forecast of the step, and who holds what, as a document."""
    from meshwright.tracing.walk import walk_roles  # slow import

    resolved = strategy.resolve(cluster.devices)
    walks = walk_roles(job, facts, strategy, cluster.devices)
    planner = Planner(job, facts, job.global_batch)
    planner.measure_for(resolved)
    context = planner.context(cluster)
    pricing = Pricing(context, resolved)
    return {
        "job": name,
        "strategy": str(resolved),
        "ranks": cluster.devices,
        "cluster": str(cluster),
        "global_batch": job.global_batch,
        "summaries": _summaries(resolved),
        "forecast": _forecast(context, resolved),
        "walks": [show_walk(walk, pricing) for walk in walks],
        "holds": strategy_shares(job, facts, resolved),
        "side_by_side": side_by_side(job, facts),
        "timeline": _timeline(context, resolved),
    }


def _summaries(strategy: Strategy) -> list[dict[str, str]]:
    """What each axis of the strategy is, in the words of its help text."""
    axes = [{"term": str(term), "summary": model_axis(term).summary} for term in strategy.axes]
    if strategy.data is None:
        return axes
    return [{"term": strategy.data, "summary": data_strategy(strategy).summary}, *axes]


def _forecast(context: PlanContext, strategy: Strategy) -> dict[str, Any]:
    """The planner's time of a step by cause."""
    forecast = consider(context, strategy).forecast
    return {"step_ms": forecast.step * 1e3, "time": {cause: 1e3 * value for cause, value in forecast.time.items()}}


def _timeline(context: PlanContext, strategy: Strategy) -> dict[str, Any] | None:
    """The pipeline's forecast timeline; None without a pipeline, or if it is too long to draw."""
    if not strategy.stage_axis or count_actions(context, strategy) > LARGEST:
        return None
    try:
        return forecast_timeline(context, strategy).to_json()
    except MeshwrightError:
        return None


@dataclass(frozen=True)
class Pricing:
    """The planner's seconds for the kernels and messages of a trace."""

    context: PlanContext
    strategy: Strategy

    def kernel(self, operation: Operation) -> float:
        """Seconds of all kernels that an operation counts."""
        kernel = Kernel(
            name=operation.kind,
            kind=operation.kind,
            dtype=operation.dtype,
            flops=Size(operation.flops),
            bytes=Size(operation.bytes),
            shape=tuple(Size(size) for size in operation.shape),
        )
        compiled = False  # a trace has compiled kernels as they are after fusion
        return operation.count * kernels.seconds(kernel, 1, 1, self.context.hardware, compiled)

    def message(self, message: Message) -> float:
        """Seconds of all messages that one counts."""
        return message.count * self._site.time(message.kind, message.bytes, self._group(message))

    @cached_property
    def _site(self) -> Site:
        context = self.context
        return Site(
            hardware=context.hardware,
            per_node=context.cluster.devices_per_node,
            step_layout=lay_out_step(self.strategy, context.facts, context.global_batch),
            collective=context.stage_costs.collective,
        )

    def _group(self, message: Message) -> RankGroup:
        site = self._site
        groups = {"data": site.data, "shard": site.shard, "replica": site.replica, "stage": site.neighbour}
        groups |= {term.traits.mesh_name: group for term, group in site.inner}
        known = groups.get(message.axis)
        if known is not None and (known.ranks == message.ranks or message.kind == "send"):
            return known
        return group_on(message.ranks, 1, site.per_node, site.nodes)  # all ranks, or stages that share a parameter


def show_walk(walk: Walk, pricing: Pricing) -> dict[str, Any]:
    """A walk as a JSON document, with its totals."""
    fullest = walk.fullest
    visits = [_show_visit(visit, pricing) for visit in walk.visits]
    return {
        "rank": walk.rank,
        "stages": list(walk.stages),
        "peak_bytes": fullest.peak,
        "peak_at": {"phase": fullest.phase, "module": fullest.module, "micro_batch": fullest.micro_batch},
        "peak_held": dict(fullest.held),
        "compute_ms": sum(visit["compute_ms"] for visit in visits),
        "flops": sum(visit["flops"] for visit in visits),
        "messages": _totals(message for visit in visits for message in visit["messages"]),
        "visits": visits,
    }


def _show_visit(visit: Visit, pricing: Pricing) -> dict[str, Any]:
    return {
        "phase": visit.phase,
        "module": visit.module,
        "micro_batch": visit.micro_batch,
        "kernels": sum(operation.count for operation in visit.operations),
        "flops": visit.flops,
        "compute_ms": 1e3 * sum(map(pricing.kernel, visit.operations)),
        "messages": [_show_message(message, pricing) for message in visit.messages],
        "gathered_bytes": visit.gathered,
        "freed_bytes": visit.freed,
        "kept_bytes": visit.kept,
        "held": dict(visit.held),
    }


def _show_message(message: Message, pricing: Pricing) -> dict[str, Any]:
    return {
        "kind": message.kind,
        "axis": message.axis,
        "ranks": message.ranks,
        "bytes": message.bytes,
        "count": message.count,
        "ms": 1e3 * pricing.message(message),
    }


def _totals(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bytes, counts and times by kind and axis."""
    sums: dict[tuple[str, str, int], Counter[str]] = {}
    for one in messages:
        total = sums.setdefault((one["kind"], one["axis"], one["ranks"]), Counter())
        total.update({"bytes": one["bytes"] * one["count"], "count": one["count"], "ms": one["ms"]})
    return [{"kind": kind, "axis": axis, "ranks": ranks, **total} for (kind, axis, ranks), total in sums.items()]


def usual_cluster(ranks: int, device: str = "H100-80GB") -> Cluster:
    """A cluster of this many GPUs, in nodes of at most eight."""
    if ranks <= 8:
        return Cluster.parse(f"{ranks}x{device}")
    per_node = next(size for size in (8, 6, 4, 2, 1) if ranks % size == 0)
    return Cluster.parse(f"{ranks // per_node}x{per_node}x{device}")
