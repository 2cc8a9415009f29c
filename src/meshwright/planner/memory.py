"""Bytes by cause on each pipeline rank, in closed form."""

from __future__ import annotations

from functools import lru_cache, partial

from meshwright import schedules
from meshwright.facts.forecast import Forecast
from meshwright.planner.stage_costs import StageCosts
from meshwright.planner.stage_work import StageWork, UnitWork
from meshwright.planner.step_layout import BUCKET, StepLayout, stages_of

GATHERED_UNITS = 2
"""Shard units that FSDP2 holds gathered at a time: the one that computes and the next, which is being gathered."""
SEGMENTS = 80 * 2**20
"""Bytes of the caching allocator's partly used segments: 20 MiB for tensors of 1 to 10 MiB, on each of some four
streams (published sweep, ranks that hold less than 3 GiB: 70 to 150 MiB more than their tensors)."""
WORKSPACE = 64 * 2**20
"""Bytes of cuBLAS's workspaces: 32 MiB on Hopper for each of two threads that compute."""
FEW = 8
"""Pipelines of up to this many ranks are evaluated on every rank."""
SLACK = 0.09
"""Fragmentation of the caching allocator, as a share of activations and logits (measured on an H200: 2 to 9 % of the
peak in eager, docs/tracing.md)."""


def forecast_memory(step_layout: StepLayout, stage_costs: StageCosts, *, gathered: float = 1.0) -> list[Forecast]:
    """Forecasts of pipeline ranks, first to last; `Refused` if the model cannot be cut into the stages.

    For a long pipeline, only the ranks that can be the fullest. `gathered` is the share of the inner axes' gathered
    inputs that is held.
    """
    stages = stage_costs.of(step_layout, gathered=gathered)
    ranks = range(step_layout.stage_ranks) if step_layout.stage_ranks <= FEW else _ends(step_layout, stages)
    return [_of_rank(step_layout, stages, rank) for rank in ranks]


def _ends(step_layout: StepLayout, stages: tuple[StageWork, ...]) -> list[int]:
    """The ranks that can be the fullest: the first have most in flight, the last the loss, one the most parameters."""
    heaviest = max(range(len(stages)), key=lambda stage: stages[stage].elements)
    last = step_layout.stage_ranks - 1
    holder = next(rank for rank, own in enumerate(stages_of(step_layout)) if heaviest in own)
    return sorted({0, 1, holder, last - 1, last})


def _of_rank(step_layout: StepLayout, stages: tuple[StageWork, ...], rank: int) -> Forecast:
    own = [stages[stage] for stage in stages_of(step_layout)[rank]]
    flights = in_flight(step_layout)[rank]
    kept, climb = _activations(own, flights)
    # The received inputs of the micro-batches in flight, which no unit of the stage counts.
    first = stages_of(step_layout)[rank][0]
    kept += max(flights) * stages[first - 1].output if first else 0.0
    logits = min(climb, max(stage.logits for stage in own))
    memory = {
        **_states(step_layout, own),
        "activations": kept + climb,
        "gathered": max((_gathered(step_layout, own, unit) for stage in own for unit, _ in stage.counted), default=0.0),
        "communication": _buffers(step_layout, own),
        "temporary": WORKSPACE,
    }
    if not step_layout.gradients_rest:
        memory |= _with_gradients(step_layout, own[0], memory["parameters"])
    memory["logits"] = min(logits, memory["activations"])
    memory["activations"] -= memory["logits"]
    if step_layout.one_process:
        memory["logits"] *= step_layout.data
    memory["allocator"] = SEGMENTS + SLACK * (memory["activations"] + memory["logits"])
    return Forecast(memory={cause: round(size) for cause, size in memory.items()})


def _states(step_layout: StepLayout, own: list[StageWork]) -> dict[str, float]:
    elements, trainable = sum(s.elements for s in own), sum(s.trainable for s in own)
    share = partial(step_layout.per_rank, inside=sum(s.inside for s in own))
    on_device = 0 if step_layout.offload else 1
    optimizer = share(trainable, over=step_layout.optimizer_over) * step_layout.moment_bytes
    optimizer += share(elements, over=step_layout.optimizer_over) * step_layout.master_bytes
    parameters = share(elements, over=step_layout.parameters_over) * step_layout.parameter_bytes
    parameters += step_layout.cast_bytes * elements
    return {
        "parameters": 0.0 if step_layout.offload == "params" else parameters,
        "gradients": share(trainable, over=step_layout.gradients_over) * step_layout.gradient_bytes
        + trainable * step_layout.beside_bytes,
        "optimizer": on_device * optimizer,
    }


def _activations(own: list[StageWork], flights: tuple[int, ...]) -> tuple[float, float]:
    """Bytes that the other micro-batches keep while one is at its peak, and that micro-batch's peak."""
    others = sum(max(0, count - 1) * stage.kept for stage, count in zip(own, flights, strict=True))
    fullest = max(range(len(own)), key=lambda i: own[i].climb - own[i].kept)
    resting = sum(stage.kept for i, stage in enumerate(own) if i != fullest and flights[i])
    return others + resting, own[fullest].climb


def _with_gradients(step_layout: StepLayout, stage: StageWork, parameters: float) -> dict[str, float]:
    """Parameters, activations, gradients and gathered parameters at the moment when their sum is largest.

    Backward frees a unit's activations and copies and allocates its gradients, so the peak is at the loss or at the
    first unit.
    """
    at_once = step_layout.gathers and stage.is_one_unit

    def held(work: StageWork | UnitWork) -> float:
        if at_once:  # gradients are whole until backward has ended
            return work.trainable * step_layout.compute_bytes
        own = step_layout.per_rank(work.trainable, work.inside, step_layout.gradients_over)
        return own * step_layout.gradient_bytes

    freed = 0 if step_layout.offload == "params" else step_layout.cast_bytes
    gathered = {id(unit): _gathered(step_layout, [stage], unit) for unit, _ in stage.counted}
    outside = min(gathered.values(), default=0.0)
    if at_once:
        outside = stage.trainable * step_layout.reduce_bytes
    before, gradients, most = stage.kept, 0.0, held(stage)
    least = parameters - stage.elements * freed
    fullest = {"parameters": least, "activations": 0.0, "gradients": most, "gathered": outside}
    for unit in reversed(stage.units):
        before -= unit.kept
        here = before + max(unit.backward_peak, 0.0 if gradients else unit.forward_peak)
        moment = {"parameters": parameters, "activations": here, "gradients": gradients}
        moment["gathered"] = gathered[id(unit)]
        fullest = max(fullest, moment, key=lambda one: sum(one.values()))
        # Units that share parameters, such as the steps of a loop, free and make each once.
        parameters, gradients = max(least, parameters - unit.elements * freed), min(most, gradients + held(unit))
    return fullest


def _gathered(step_layout: StepLayout, own: list[StageWork], running: UnitWork) -> float:
    """Bytes of gathered parameters, and of gradients before they are scattered, while a unit runs."""
    if not step_layout.gathers:
        return 0.0
    low, units = step_layout.compute_bytes, [unit for stage in own for unit in stage.units]
    blocks = max((unit.gathered_with for unit in units if unit.is_block), default=0)
    unit = blocks if running.is_block else running.gathered_with
    held = sum(stage.elements for stage in own)
    if all(stage.is_one_unit for stage in own):
        return 2 * held * low  # nothing is gathered after it, so the message stays beside what was copied out of it
    if step_layout.reshards:
        around = max(0, held - sum(unit.in_units for unit in units))  # gathered with the model's root, and kept
        held = around + (GATHERED_UNITS if running.is_block else 1) * unit
    return held * low + unit * (low + step_layout.reduce_bytes)


def _buffers(step_layout: StepLayout, own: list[StageWork]) -> float:
    """Buffers of a gradient sum over ranks, besides the gradients."""
    if step_layout.reduced == 1 or step_layout.gathers or step_layout.beside_bytes:
        return 0.0
    if step_layout.optimizer_over == 1:
        # DDP sends its own bucket, or a rounded copy of it. A large tensor is a bucket by itself.
        bucket = max(
            [BUCKET / step_layout.gradient_bytes, *(u.elements for s in own for u in s.units if not u.is_block)]
        )
        copies = step_layout.reduce_bytes < step_layout.gradient_bytes
        # Its buckets are also of parameters that the model does not use.
        unused = sum(stage.idle for stage in own) * step_layout.gradient_bytes if step_layout.overlaps else 0
        return unused + copies * min(bucket, sum(stage.trainable for stage in own)) * step_layout.reduce_bytes
    return float(max((unit.elements for stage in own for unit in stage.units), default=0) * step_layout.reduce_bytes)


@lru_cache(maxsize=4096)
def _flights(schedule: str, ranks: int, virtual: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    if formula := schedules.FAMILIES[schedule].in_flight:
        return tuple((formula(rank, ranks, micro_batches),) for rank in range(ranks))
    if ranks > FEW:
        # The number in flight grows in proportion to the length of the pipeline.
        few = _flights(schedule, FEW, virtual, max(FEW, round(micro_batches * FEW / ranks)))
        places = [few[round(rank * (FEW - 1) / (ranks - 1))] for rank in range(ranks)]
        return tuple(tuple(min(micro_batches, round(count * ranks / FEW)) for count in place) for place in places)
    # The number in flight does not grow once the pipeline is full, so a short run gives the same counts.
    count = schedules.micro_batches_near(schedule, ranks, min(micro_batches, 3 * ranks))
    made = schedules.make(schedule, ranks, count)
    found = schedules.count_in_flight(made, until=schedules.Kind.BACKWARD_WEIGHT)
    return tuple(tuple(found.stages[stage] for stage in made.stages_of(rank)) for rank in range(ranks))


def in_flight(step_layout: StepLayout) -> tuple[tuple[int, ...], ...]:
    """For each pipeline rank, the number of micro-batches whose activations each of its stages keeps."""
    if step_layout.stage_ranks == 1:
        return ((1,),)
    return _flights(step_layout.schedule, step_layout.stage_ranks, step_layout.virtual, step_layout.micro_batches)
