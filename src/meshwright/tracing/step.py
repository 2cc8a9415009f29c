"""Trace one training step: run the code that training runs, on fake tensors and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from meshwright.assemble.check import check
from meshwright.errors import MeshwrightError, Refused, one_line
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.strategies import Place, data_strategy
from meshwright.strategies.pipeline.sizes import is_pipelined
from meshwright.tracing.block_stack import find_period, find_repeated_blocks, whole_periods
from meshwright.tracing.extrapolate import count_blocks, extrapolate, if_shorter_runs, with_fewer_blocks
from meshwright.tracing.record_step import Recorded, record_step

SIZES, SIZES_OF_A_STAGE, SIZES_DIVIDED, SIZES_COMPILED = (4, 8), (3, 6), (3, 5), (2, 4)
"""Blocks of the two shorter models that a longer one is extrapolated from; under a pipeline, of each stage.

With fewer than three blocks, the peak of an eager step is at another moment than in a long model. A tensor axis takes
three times as long to trace. A model that is compiled as one takes a second per block to capture.
"""


def trace_step(
    job: Job,
    facts: ModelFacts,
    strategy: Strategy,
    *,
    ranks: int,
    rank: int = 0,
    device: str = "cuda",
    whole: bool = False,
    capacity: float = inf,
    workspaces: bool = True,
) -> Trace:
    """What `rank` of `ranks` allocates, computes and sends in one optimizer step.

    `workspaces` are those of cuBLAS, which a rehearsal on a CPU does not have.

    A model with many equal blocks is extrapolated from two traces with fewer blocks, unless `whole` is set: then
    `reserved` is exact, and more than `capacity`, the bytes of the device, only if the step does not run on it.
    """
    resolved = refuse_trace(job, facts, strategy, ranks, device)
    try:
        recorded = None if whole else _from_shorter(job, facts, resolved, ranks, rank)
        recorded = recorded or record_step(job, facts, resolved, ranks, rank, capacity, workspaces=workspaces)
    except MeshwrightError:
        raise
    except Exception as error:
        raise Refused(
            f"A step under {resolved} cannot be traced on fake tensors: {one_line(error)} "
            "Use the planner's estimate, or do a dry run on a GPU."
        ) from error
    return _trace(recorded, rank, ranks, _unseen(resolved, recorded))


def trace_roles(
    job: Job, facts: ModelFacts, strategy: Strategy, ranks: int, *, whole: bool = False, capacity: float = inf
) -> list[Trace]:
    """One trace for each distinct role: the places of a pipeline, or rank 0 if all ranks do the same.

    Places between the first and the last do the same, except that earlier ones hold more micro-batches in flight. So
    the second place represents them.
    """
    resolved = refuse_trace(job, facts, strategy, ranks, "cuda")
    places = resolved.stage_ranks
    chosen = (place * ranks // places for place in sorted({0, min(1, places - 1), places - 1}))
    return [trace_step(job, facts, strategy, ranks=ranks, rank=rank, whole=whole, capacity=capacity) for rank in chosen]


def refuse_trace(job: Job, facts: ModelFacts, strategy: Strategy, ranks: int, device: str) -> Strategy:
    """The resolved strategy. Raises `Refused` if it cannot be traced."""
    if device != "cuda":
        raise Refused(f"A trace is of a CUDA device, but the device is {device!r}; leave `device` out.")
    if strategy.traits.many_devices:
        raise Refused(f"{strategy.data} is one process with several GPUs, which cannot be traced; trace ddp instead.")
    if facts.unseen:
        raise Refused(f"The model does not run on fake tensors, so it cannot be traced: {facts.unseen}.")
    return check(job, facts, strategy, Place(device="cpu", devices=ranks, ranks=ranks, local_ranks=1))


def _from_shorter(job: Job, facts: ModelFacts, strategy: Strategy, ranks: int, rank: int) -> Recorded | None:
    """The record of the whole model, extrapolated if tracing the two shorter models takes less time; else None."""
    stack = find_repeated_blocks(facts)
    if stack is not None and stack.before and strategy.compile:  # its moments are not named by blocks
        return None
    small, large = _sizes(strategy)
    if stack is None or (blocks := count_blocks(job, facts, strategy, stack, ranks, rank)) <= small + large + 1:
        return None
    period = find_period(job, stack)
    if period is None:
        return None
    small, large = whole_periods((small, large), period)
    if blocks <= small + large + 1:
        return None
    shorter = [with_fewer_blocks(job, facts, strategy, stack, size) for size in (small, large)]
    records = if_shorter_runs(
        lambda: [record_step(s.job, s.facts, strategy, ranks, rank) for s in shorter if s is not None]
    )
    return extrapolate(*records, sizes=(small, large), to=blocks) if records and len(records) == 2 else None


def _sizes(strategy: Strategy) -> tuple[int, int]:
    if is_pipelined(strategy):
        return SIZES_OF_A_STAGE
    if strategy.splits_activations:
        return SIZES_DIVIDED
    by_block = bool(strategy.inner_axes) or data_strategy(strategy).compiles_blocks(strategy)
    return SIZES_COMPILED if strategy.compile and not by_block else SIZES


def _unseen(strategy: Strategy, recorded: Recorded) -> str:
    found = []
    if recorded.uncompiled:
        found.append(f"what cannot be compiled on fake tensors was traced as eager: {recorded.uncompiled}")
    if recorded.divided:
        found.append(
            "what cannot be compiled as one graph was traced as eager, and the modules that it calls as compiled one by"
            f" one: {recorded.divided}"
        )
    if strategy.offload == "params":
        found.append("offload=params was traced as if sharded parameters lay on the device")
    return "; ".join(found)


def _trace(recorded: Recorded, rank: int, ranks: int, unseen: str) -> Trace:
    memory = max(recorded.peaks.values(), key=lambda causes: causes.total())
    return Trace(
        rank=rank,
        ranks=ranks,
        memory={cause: size for cause, size in memory.items() if size},
        reserved=recorded.reserved,
        returns=recorded.returns,
        operations=tuple(replace(operation, count=count) for operation, count in recorded.operations.items()),
        messages=tuple(replace(message, count=count) for message, count in recorded.messages.items()),
        unseen=unseen,
        stages=recorded.stages,
    )
