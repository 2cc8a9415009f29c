"""Show how a strategy would lay out a job, without starting a process: splits, stages and schedule."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import Any

from meshwright import schedules
from meshwright.assemble.axes import mesh_sizes
from meshwright.assemble.check import check
from meshwright.assemble.dry_run import dry_run
from meshwright.assemble.float8 import layers_in_float8
from meshwright.assemble.staging import nominal_batch, tracer
from meshwright.describe.calls import TensorLeaf
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts, ParameterFacts, unit_of
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import model_to_read
from meshwright.strategies import Place, data_strategy, model_axis
from meshwright.strategies.pipeline.sizes import count_micro_batches, count_stages, is_pipelined
from meshwright.strategies.pipeline.stages import Stages, cut_stages, find_crossings, held_parameters

AROUND, WHOLE = "(around the units)", "(whole on every rank)"
"""Names of the rows for parameters that are in no shard unit, and for those that are not sharded."""


def show_layout(job: Job, facts: ModelFacts, strategy: Strategy, ranks: int) -> dict[str, Any]:
    """The layout as a JSON document. Refuses what training would refuse."""
    # CUDA graphs change nothing of the layout, but a CPU would refuse them.
    device = "cuda" if strategy.graphs else "cpu"
    place = Place(device=device, devices=ranks, ranks=ranks, local_ranks=ranks)
    resolved = check(job, facts, strategy, place)
    dry_run(job, facts, resolved)
    document: dict[str, Any] = {"strategy": str(resolved), "ranks": ranks, "mesh": mesh_sizes(resolved)}
    if resolved.traits.shards:
        document["units"] = _units(facts, resolved)
    if resolved.number_format.factors:
        document["float8"] = layers_in_float8(model_to_read(job.model), facts, resolved)
    if resolved.loss == "pieced" and facts.head is not None:
        document["head"] = asdict(facts.head)
    for term in resolved.axes:
        document |= model_axis(term).show(term, resolved, facts, job)
    if is_pipelined(resolved):
        stages = cut_stages(facts, count_stages(resolved), job.stages)
        micro_batches = count_micro_batches(resolved, job.global_batch)
        schedule = schedules.make(resolved.schedule, resolved.stage_ranks, micro_batches)
        document["stages"] = _stages(job, facts, resolved, stages, schedule)
        document["schedule"] = _schedule(facts, stages, schedule)
    return document


def _units(facts: ModelFacts, strategy: Strategy) -> list[dict[str, Any]]:
    """What is gathered and reduced together: each shard unit, then the rest, then what every rank keeps whole."""
    technique = data_strategy(strategy)
    layout, whole = technique.layout(strategy), technique.kept_whole(facts)
    units = facts.gathered_units if strategy.traits.gathers else facts.shard_units
    groups: dict[str, list[ParameterFacts]] = {name: [] for name in (*units, AROUND, WHOLE)}
    for parameter in facts.parameters:
        unit = unit_of(parameter.name, units) or AROUND
        groups[WHOLE if parameter.name in whole else unit].append(parameter)
    rows = []
    for unit, held in groups.items():
        count = sum(parameter.count for parameter in held)
        kept = sum(p.count * (layout.parameter_bytes or p.itemsize) for p in held)
        row = {
            "unit": unit,
            "parameters": count,
            "gathered_bytes": sum(p.count * min(p.itemsize, strategy.number_format.bytes) for p in held),
            "kept_bytes": kept if unit == WHOLE else -(-kept // layout.parameters),
            "names": [parameter.name for parameter in held],
        }
        if held:
            rows.append(row)
    return rows


def _stages(
    job: Job, facts: ModelFacts, strategy: Strategy, stages: Stages, schedule: schedules.Schedule
) -> list[dict[str, Any]]:
    pristine, follow = tracer(job, facts, strategy, seed=0)
    flow = follow(nominal_batch(job, strategy))
    crossings = find_crossings(flow, stages)
    held = held_parameters(pristine.model, flow, stages, crossings)
    sizes = {p.name: p.count * p.itemsize for p in facts.parameters}
    flops = sum(call.flops for call in flow.calls) or 1.0
    rows = []
    for index in range(len(stages)):
        calls = [flow.calls[call] for call in stages.calls_of(index)]
        received = [flow.calls[value.call].leaves[value.leaf] for value in crossings.values[index]]
        rows.append(
            {
                "stage": index,
                "rank": schedule.rank_of(index),
                "first": calls[0].name,
                "last": calls[-1].name,
                "parameter_bytes": sum(sizes[name] for name in held[index]),
                "flops_share": sum(call.flops for call in calls) / flops,
                "receives": [
                    {"shape": list(leaf.shape), "bytes": prod(leaf.shape) * leaf.dtype.itemsize}
                    for leaf in received
                    if isinstance(leaf, TensorLeaf)
                ],
            }
        )
    return rows


def _schedule(facts: ModelFacts, stages: Stages, schedule: schedules.Schedule) -> dict[str, Any]:
    """Simulate the schedule with each stage's share of the flops; a full backward pass costs twice its forward."""
    costs = [sum(facts.calls[call].flops for call in stages.calls_of(stage)) or 1.0 for stage in range(len(stages))]
    played = schedules.simulate(schedule, forward=costs, backward_input=costs, backward_weight=costs)
    return {
        "name": schedule.name,
        "micro_batches": schedule.micro_batches,
        "bubble": played.bubble,
        "bubble_if_balanced": schedules.simulate(schedule).bubble,
        "in_flight": list(played.until_weight.ranks),
        "grid": str(schedule),
    }
