"""Which part of each module's parameters every rank holds between steps, for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright import schedules
from meshwright.assemble.axes import mesh_sizes
from meshwright.assemble.check import check
from meshwright.errors import MeshwrightError
from meshwright.facts.data_axis import word_of_stage
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts, ParameterFacts, unit_of
from meshwright.facts.model_axis import AxisTerm, first_axes
from meshwright.facts.strategy import Strategy
from meshwright.strategies import Place, data_strategy, inner_axis
from meshwright.strategies.pipeline.sizes import count_micro_batches, count_stages
from meshwright.strategies.pipeline.stages import cut_stages

DRAWN_RANKS = 8
"""The most ranks that a picture shows."""
SIZES = (4, 2)
"""Numbers of ranks for the comparison of strategies; the first that a job allows."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A rank's part of a unit."""

    start: float
    end: float
    bytes: float


def strategy_shares(job: Job, facts: ModelFacts, strategy: Strategy) -> dict[str, Any]:
    """For each unit and each of the first ranks: the part that the rank holds, as a range of 0 to 1, and its bytes."""
    units = _units(facts)
    ranks = strategy.data_ranks * strategy.model_ranks // strategy.batch_splits
    drawn = range(min(ranks, DRAWN_RANKS))
    reads, per_place = _reads_of_places(job, facts, strategy), ranks // strategy.stage_ranks
    first_only = strategy.traits.many_devices  # the others get copies in each forward pass
    held = [
        [
            None if first_only and rank else _part(facts, strategy, rank, parameters, reads[rank // per_place])
            for _, parameters in units
        ]
        for rank in drawn
    ]
    return {
        "strategy": str(strategy),
        "ranks": ranks,
        "mesh": mesh_sizes(strategy),
        "units": [{"name": name, "bytes": _bytes(parameters)} for name, parameters in units],
        "held": [[None if part is None else vars(part) for part in row] for row in held],
    }


def side_by_side(job: Job, facts: ModelFacts) -> list[dict[str, Any]]:
    """The same job under plain data, sharded, tensor and pipeline parallelism, or why it cannot run so."""
    inner, staged = first_axes()
    kinds: dict[str, Any] = {
        "data": lambda size: f"{word_of_stage(0)}={size}",
        "sharded": lambda size: f"{word_of_stage(3)}={size}",
        "tensor": lambda size: str(AxisTerm.of(inner, size)),
        "pipeline": lambda size: str(AxisTerm.of(staged, size)),
    }
    texts = {kind: [text(size) for size in SIZES] for kind, text in kinds.items()}
    return [{"kind": kind, **_first_allowed(job, facts, tried)} for kind, tried in texts.items()]


def _first_allowed(job: Job, facts: ModelFacts, texts: Sequence[str]) -> dict[str, Any]:
    reason = ""
    for text in texts:
        strategy = Strategy.parse(text)
        ranks = (strategy.data_size or 1) * strategy.model_ranks
        place = Place(device="cpu", devices=ranks, ranks=ranks, local_ranks=ranks)
        try:
            return strategy_shares(job, facts, check(job, facts, strategy, place))
        except MeshwrightError as error:
            reason = str(error)
    return {"strategy": texts[-1], "refused": reason}


def _units(facts: ModelFacts) -> list[tuple[str, list[ParameterFacts]]]:
    """Modules in the order of their calls, each with its parameters; tied ones with the first."""
    names = list(dict.fromkeys(call.name for call in facts.calls)) or list(facts.blocks)
    groups: dict[str, list[ParameterFacts]] = {name: [] for name in names}
    for parameter in facts.parameters:
        owner = unit_of(parameter.name, groups)
        groups.setdefault(owner or "(model)", []).append(parameter)
    return [(name, parameters) for name, parameters in groups.items() if parameters]


def _bytes(parameters: list[ParameterFacts]) -> int:
    return sum(parameter.count * parameter.itemsize for parameter in parameters)


def _part(
    facts: ModelFacts, strategy: Strategy, rank: int, parameters: list[ParameterFacts], reads: set[str] | None
) -> _Part | None:
    """What a rank, whose stages read these parameters, holds of a unit; None if nothing."""
    if reads is not None and not reads.intersection(name for p in parameters for name in p.names):
        return None
    summed = strategy.reduced_ranks // strategy.data_ranks
    inner_ranks = strategy.inner_ranks // summed
    inner = rank % inner_ranks
    data = rank // inner_ranks % strategy.reduced_ranks
    shards = strategy.state_shards if "parameters" in strategy.traits.shards else 1
    whole = data_strategy(strategy).kept_whole(facts) if shards > 1 else frozenset()
    across = [term for term in strategy.inner_axes if not term.traits.splits_batch]
    inside = [term for term in strategy.inner_axes if term.traits.splits_batch]  # of the data axis
    size, divided, exchanged = 0.0, 0, 0
    for parameter in parameters:
        own = parameter.count * parameter.itemsize
        parts, own_parts = (_parts_of(facts, terms, parameter) for terms in (across, inside))
        divided += own if parts > 1 else 0
        exchanged += own if own_parts > 1 else 0
        size += own / parts / (own_parts if parameter.name in whole else max(shards, own_parts))
    parts = inner_ranks if 2 * divided > _bytes(parameters) else 1
    groups = strategy.batch_splits if 2 * exchanged > _bytes(parameters) else 1
    pieces = max(1, shards // groups)
    start = (inner % parts + (data % groups + data // groups % pieces / pieces) / groups) / parts
    return _Part(start=start, end=start + 1 / parts / groups / pieces, bytes=size)


def _parts_of(facts: ModelFacts, terms: Sequence[AxisTerm], parameter: ParameterFacts) -> int:
    """Over how many ranks of these axes a parameter is divided."""
    divisions = (inner_axis(term).division(facts, term.size) for term in terms)
    return max((division.parts_of(parameter.names) for division in divisions), default=1)


def _reads_of_places(job: Job, facts: ModelFacts, strategy: Strategy) -> list[set[str] | None]:
    """For each place of a pipeline, the parameters that its stages read; None without a pipeline: all of them."""
    if strategy.stage_axis is None:
        return [None]
    stages = cut_stages(facts, count_stages(strategy), job.stages)
    schedule = schedules.make(strategy.schedule, strategy.stage_ranks, count_micro_batches(strategy, job.global_batch))
    found: list[set[str]] = [set() for _ in range(strategy.stage_ranks)]
    for stage in range(len(stages)):
        calls = (facts.calls[call] for call in stages.calls_of(stage))
        found[schedule.rank_of(stage)] |= {name for call in calls for name in call.reads}
    return [*found]
