"""`pp=N:schedule` and `layers=N`: how many stages and micro-batches, and what cannot be."""

from __future__ import annotations

from meshwright import schedules
from meshwright.errors import Refused
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy

SPLIT_BACKWARD = ("zb", "zbv", "dualpipev")
"""Schedules that put off the weights' part of a backward pass."""
BUSY = 4
"""Micro-batches per stage that are aimed at where the user names no size: a bubble of about a fifth or less."""


def is_pipelined(strategy: Strategy) -> bool:
    return strategy.pp > 1 or strategy.layers > 1


def pipeline_ranks(strategy: Strategy) -> int:
    return strategy.pp * strategy.layers


def schedule_name(strategy: Strategy) -> str:
    return strategy.schedule or "layers"


def count_stages(strategy: Strategy) -> int:
    return pipeline_ranks(strategy) * schedules.FAMILIES[schedule_name(strategy)].virtual


def count_micro_batches(strategy: Strategy, global_batch: int) -> int:
    """Micro-batches in one step of a resolved strategy."""
    samples = -(-global_batch // strategy.data_ranks)
    name, ranks = schedule_name(strategy), pipeline_ranks(strategy)
    if strategy.micro_batch is not None:
        count = -(-samples // strategy.micro_batch)
        if reason := schedules.refuse(name, ranks, count):
            raise Refused(
                f"mb={strategy.micro_batch} cuts a data rank's {samples} samples into {count} micro-batches: {reason}"
            )
        return count
    if name == "layers":
        return 1
    allowed = [n for n in range(1, min(samples, BUSY * ranks) + 1) if schedules.refuse(name, ranks, n) is None]
    if not allowed:
        least = schedules.least_micro_batches(name, ranks)
        raise Refused(
            f"pp={strategy.pp}:{name} needs at least {least} micro-batches, but a data rank has {samples} samples of a "
            f"global batch of {global_batch}; use a global batch of {least * strategy.data_ranks} or more, or pp:gpipe."
        )
    # One that divides is worth an idle rank or two, but not a pipeline that is never full.
    dividing = [n for n in allowed if samples % n == 0 and n >= ranks]
    return max(dividing or allowed)


def refuse_pipeline(strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
    """Why this pipeline cannot be, beside where the model is cut."""
    count = count_micro_batches(strategy, global_batch)
    if facts.batch_norms and count > 1:
        return (
            f"BatchNorm ({facts.batch_norms[0]}) normalises over a micro-batch, and {strategy} cuts every batch into "
            f"{count}, which is another training; use GroupNorm or LayerNorm in the model, "
            f"layers={pipeline_ranks(strategy)}, or a data strategy."
        )
    if strategy.offload == "params":
        return "offload=params is not built for a pipeline; use offload=optimizer."
    return None
