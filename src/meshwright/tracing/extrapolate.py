"""Extrapolate a step of a long model, say of eighty layers, from models with four and eight of its repeated blocks.

Blocks of one list that have the same parameters and costs are alike. Every stage of a pipeline keeps the same number of
blocks. At every moment of a step, memory and work are affine in the number of blocks. A peak is not: it may be at
another moment in a longer model. So every moment is extrapolated separately, and the peak is found among the results.
The memory of middle blocks is between that of the first and the last ones. What the allocator reserves beyond the peak
comes in segments and is not affine, so the larger of the two amounts is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.facts.tensor_plan import TensorPlan
from meshwright.facts.trace import Message, Operation
from meshwright.strategies.pipeline.sizes import count_micro_batches, count_stages, is_pipelined
from meshwright.strategies.pipeline.stages import Stages, cut_stages
from meshwright.tracing.block_stack import BlockStack
from meshwright.tracing.record_step import Recorded


def extrapolate(shorter: Recorded, longer: Recorded, *, sizes: tuple[int, int], to: float) -> Recorded:
    """The record of a model with `to` blocks, from the records of models with `sizes` blocks."""
    times = (to - sizes[0]) / (sizes[1] - sizes[0])
    moments = [moment for moment in shorter.peaks if moment in longer.peaks]
    peaks = {m: _causes(shorter.peaks[m], longer.peaks[m], times) for m in moments}
    return Recorded(
        peaks=peaks,
        reserved=_peak(peaks) + max(record.reserved - _peak(record.peaks) for record in (shorter, longer)),
        returns=0,
        operations=_operations(shorter.operations, longer.operations, times),
        messages=_messages(shorter.messages, longer.messages, times),
        stages=longer.stages,
        uncompiled=longer.uncompiled,
        divided=longer.divided,
    )


def _peak(peaks: dict[str, Counter[str]]) -> int:
    return max(causes.total() for causes in peaks.values())


def _affine(first: float, second: float, times: float) -> int:
    return max(0, round(first + (second - first) * times))


def _causes(first: Counter[str], second: Counter[str], times: float) -> Counter[str]:
    return Counter({cause: _affine(first[cause], second[cause], times) for cause in first | second})


Item = TypeVar("Item", Operation, Message)


def _operations(first: Counter[Operation], second: Counter[Operation], times: float) -> Counter[Operation]:
    return _items(first, second, times, lambda item: replace(item, flops=0.0, bytes=0.0, shape=()), ("flops", "bytes"))


def _messages(first: Counter[Message], second: Counter[Message], times: float) -> Counter[Message]:
    return _items(first, second, times, lambda item: replace(item, bytes=0.0), ("bytes",))


def _items(
    first: Counter[Item], second: Counter[Item], times: float, kind: Callable[[Item], Item], sums: tuple[str, ...]
) -> Counter[Item]:
    """Extrapolate counts. An item whose size grows (an update of all parameters at once) is matched by its kind."""
    grown: Counter[Item] = Counter()
    changed: dict[Item, list[Counter[str]]] = {}
    for item in first | second:
        before, after = first[item], second[item]
        if after >= before > 0:
            grown[item] = _affine(before, after, times)
            continue
        totals = changed.setdefault(kind(item), [Counter(), Counter()])
        for total, count in zip(totals, (before, after), strict=True):
            total["count"] += count
            for name in sums:
                total[name] += count * getattr(item, name)
    for key, (small, large) in changed.items():
        count = max(1, _affine(small["count"], large["count"], times))
        values: Any = {name: _affine(small[name], large[name], times) / count for name in sums}
        grown[replace(key, **values)] += count
    return grown


@dataclass(frozen=True)
class Shortened:
    """A job and its facts without some of the blocks."""

    job: Job
    facts: ModelFacts


def with_fewer_blocks(
    job: Job, facts: ModelFacts, strategy: Strategy, stack: BlockStack, blocks: int
) -> Shortened | None:
    """`job` with this number of alike blocks, or this number on each pipeline stage; None if there are fewer."""
    if not is_pipelined(strategy):
        kept = list(range(stack.before + blocks))
        return _keep(job, facts, stack, kept, None) if blocks <= stack.blocks else None
    if stack.before:  # stages would not be alike
        return None
    stages = cut_stages(facts, count_stages(strategy), job.stages)
    by_stage = _blocks_of_stages(facts, stack, stages)
    if min(map(len, by_stage)) < blocks:
        return None
    kept = [index for own in by_stage for index in own[:blocks]]
    return _keep(job, facts, stack, kept, stages)


Result = TypeVar("Result")


def if_shorter_runs(run: Callable[[], Result]) -> Result | None:
    """What is found with fewer blocks; None if the model does not run with them, such as one that pairs two lists."""
    try:
        return run()
    except MeshwrightError:
        raise
    except Exception:  # if the whole model does not run either, it says why
        return None


def count_blocks(job: Job, facts: ModelFacts, strategy: Strategy, stack: BlockStack, ranks: int, rank: int) -> float:
    """Alike blocks of the model; under a pipeline, the average over the rank's stages."""
    if not is_pipelined(strategy):
        return stack.blocks
    by_stage = _blocks_of_stages(facts, stack, cut_stages(facts, count_stages(strategy), job.stages))
    places, count = strategy.stage_ranks, count_micro_batches(strategy, job.global_batch)
    own = schedules.make(strategy.schedule, places, count).stages_of(rank * places // ranks)
    return sum(len(by_stage[stage]) for stage in own) / len(own)


def _blocks_of_stages(facts: ModelFacts, stack: BlockStack, stages: Stages) -> list[list[int]]:
    """For each stage, the indices in the list of the blocks that it calls."""
    places = {f"{stack.name}.{index}": index for index in range(stack.before + stack.blocks)}
    names = [[facts.calls[call].name for call in stages.calls_of(stage)] for stage in range(len(stages))]
    return [[places[name] for name in own if name in places] for own in names]


def _keep(job: Job, facts: ModelFacts, stack: BlockStack, kept: list[int], stages: Stages | None) -> Shortened:
    rename = _renaming(stack, kept)
    hint = None
    if stages is not None:
        hint = [str(rename(facts.calls[start].name)) for start in stages.starts]
        hint = hint[len(hint) - len(job.stages) :] if job.stages is not None else hint[1:]
    shorter = replace(job, model=partial(_build, job.model, stack.name, kept), stages=hint)
    return Shortened(shorter, _rename_facts(facts, rename))


def _build(build: Callable[[], nn.Module], name: str, kept: list[int]) -> nn.Module:
    model = build()
    blocks = model.get_submodule(name)
    assert isinstance(blocks, nn.ModuleList | nn.Sequential)
    chosen = [blocks[index] for index in kept]
    while len(blocks):
        del blocks[-1]
    blocks.extend(chosen)
    return model


def _renaming(stack: BlockStack, kept: list[int]) -> Callable[[str], str | None]:
    """From a name in the whole model to the name in the shorter one; None for removed blocks."""
    start = f"{stack.name}." if stack.name else ""
    places = {str(old): str(new) for new, old in enumerate(kept)}

    def rename(name: str) -> str | None:
        if not name.startswith(start):
            return name
        index, dot, rest = name.removeprefix(start).partition(".")
        if not index.isdigit():
            return name
        return f"{start}{places[index]}{dot}{rest}" if index in places else None

    return rename


def _rename_facts(facts: ModelFacts, rename: Callable[[str], str | None]) -> ModelFacts:
    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new for name in names if (new := rename(name)) is not None)

    return replace(
        facts,
        parameters=tuple(replace(p, names=renamed(p.names)) for p in facts.parameters if renamed(p.names)),
        blocks=renamed(facts.blocks),
        shard_units=renamed(facts.shard_units),
        calls=tuple(
            replace(call, name=new, reads=renamed(call.reads))
            for call in facts.calls
            if (new := rename(call.name)) is not None
        ),
        experts=tuple(
            replace(one, module=new, caller=rename(one.caller) or "", parameters=renamed(one.parameters))
            for one in facts.experts
            if (new := rename(one.module)) is not None
        ),
        batch_norms=renamed(facts.batch_norms),
        read_elsewhere=renamed(facts.read_elsewhere),
        read_outside=renamed(facts.read_outside),
        tensor_plan=_rename_plan(facts.tensor_plan, rename),
    )


def _rename_plan(plan: TensorPlan | None, rename: Callable[[str], str | None]) -> TensorPlan | None:
    if plan is None:
        return None
    rows = [
        replace(row, module=new, feeds=(rename(row.feeds) or "") if row.feeds else "")
        for row in plan.rows
        if (new := rename(row.module)) is not None
    ]
    return replace(plan, rows=tuple(rows))
