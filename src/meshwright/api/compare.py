"""Run strategies head to head, and put each measurement next to the planner's forecast.

document = compare_command(CompareRequest(job="examples/gpt.py", ranks=4)).document
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.api.job_planner import Planner
from meshwright.api.timeline import LARGEST, count_actions, forecast_timeline
from meshwright.compare.compare import Compared, compare, count_cores, note_on_cores
from meshwright.errors import MeshwrightError, one_line
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import LOCAL, Cluster
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import BACKWARD, FORWARD, INPUT, WEIGHT, Timeline
from meshwright.planner.search import PlanContext, consider
from meshwright.probe.machine import local_cluster
from meshwright.runtime.request import CompareRequest
from meshwright.units import mib


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The document that `compare --json` prints, and the profiles that go only into a trace file."""

    document: dict[str, Any]
    profiles: dict[str, list[dict[str, Any]]]
    """By strategy: when each rank computed and communicated during the profiled step."""


def compare_command(request: CompareRequest, *, on: str = LOCAL) -> Comparison:
    """Run `meshwright compare`; `on` is the cluster that forecasts are made for."""
    named = Cluster.parse(on)
    done = compare(request)
    matrix = done.matrix
    cluster = this_machine(matrix.device, request.ranks) if named.device == LOCAL else named
    planner = Planner(matrix.job, matrix.facts, matrix.job.global_batch)
    rows = [with_forecast(row, planner, cluster, matrix.able.get(row["strategy"])) for row in done.rows]
    return Comparison(document=_document(request, done, str(cluster), rows), profiles=done.profiles)


def this_machine(device: str, ranks: int) -> Cluster:
    """This machine as a cluster with one device per rank; CPU ranks that share cores get a fraction of the speed."""
    cluster = local_cluster(device, devices=ranks)
    share = count_cores() / ranks
    if device != "cpu" or share >= 1:
        return cluster
    whole = hardware_of(cluster)
    flops = {precision: peak * share for precision, peak in whole.flops.items()}
    return replace(cluster, hardware={**cluster.hardware, "flops": flops, "bandwidth": whole.bandwidth * share})


def with_forecast(row: dict[str, Any], planner: Planner, cluster: Cluster, strategy: Strategy | None) -> dict[str, Any]:
    """Add the forecast to a row, even if its run failed; a forecast that cannot be made gives its reason."""
    if strategy is None:
        return row
    try:
        planner.search_named(cluster, [strategy])  # measures the job's costs under the strategy's policies
        context = planner.context(cluster)
        plan = consider(context, strategy)
    except Exception as error:  # report the measurement, which took minutes, even if its forecast fails
        return {**row, "forecast": {"reason": str(error) if isinstance(error, MeshwrightError) else one_line(error)}}
    timeline = _timeline(context, strategy) if row["timeline"] is not None else None
    forecast = forecast_of(plan, row)
    if timeline is None:
        return {**row, "forecast": forecast}
    return {**row, "forecast": {**forecast, "bubble": bubble_of(timeline)}, "forecast_timeline": timeline.to_json()}


def forecast_of(plan: Plan, row: dict[str, Any]) -> dict[str, Any]:
    """A plan's numbers under the row's field names, and their errors relative to the measurement."""
    step, peak = 1e3 * plan.forecast.step, mib(plan.peak)
    return {
        "step_ms": step,
        "peak_mib": peak,
        "memory": {cause: mib(size) for cause, size in plan.forecast.memory.items() if cause != "allocator"},
        "time": {cause: 1e3 * seconds for cause, seconds in plan.forecast.time.items()},
        "bubble": plan.forecast.time.get("bubble", 0.0) / plan.forecast.step if plan.strategy.stage_axis else None,
        "error": {"time": _off(step, row["step_ms"]), "memory": _off(peak, row["peak_mib"])},
        "grade": plan.grade,
    }


def _off(forecast: float, measured: float | None) -> float | None:
    return forecast / measured - 1 if measured else None


def bubble_of(timeline: Timeline) -> float:
    """Idle share of the ranks' time between the first start and the last end, as `compare` measures it."""
    passes = [piece for piece in timeline.pieces if piece.kind in (FORWARD, BACKWARD, INPUT, WEIGHT)]
    length = max(piece.end for piece in passes) - min(piece.start for piece in passes)
    return 1 - sum(piece.seconds for piece in passes) / (length * timeline.ranks)


def _timeline(context: PlanContext, strategy: Strategy) -> Timeline | None:
    if count_actions(context, strategy) > LARGEST:
        return None
    try:
        return forecast_timeline(context, strategy)
    except MeshwrightError:
        return None


def _document(request: CompareRequest, done: Compared, cluster: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "job": request.job,
        "ranks": request.ranks,
        "device": done.matrix.device,
        "cluster": cluster,
        "global_batch": done.matrix.job.global_batch,
        "steps": request.steps,
        "rounds": request.rounds,
        "note": note_on_cores(request.ranks, done.matrix.device),
        "results": rows,
        "references": done.references,
        "left_out": done.left_out,
        "seconds": done.seconds,
        "interrupted": done.interrupted,
    }
