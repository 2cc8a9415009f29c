"""Stages and micro-batches of a stage axis: how many there are, and what is refused."""

from __future__ import annotations

from meshwright import schedules
from meshwright.errors import Refused
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy

BUSY = 4
"""Micro-batches per stage to aim for if the user names no size: a bubble of about a fifth or less."""


def is_pipelined(strategy: Strategy) -> bool:
    return strategy.stage_axis is not None


def count_stages(strategy: Strategy) -> int:
    return strategy.stage_ranks * schedules.FAMILIES[strategy.schedule].virtual


def count_micro_batches(strategy: Strategy, global_batch: int) -> int:
    """Micro-batches in one step of a resolved strategy."""
    samples = -(-global_batch // strategy.data_ranks)
    name, ranks = strategy.schedule, strategy.stage_ranks
    if strategy.micro_batch is not None:
        count = -(-samples // strategy.micro_batch)
        if reason := schedules.refuse(name, ranks, count):
            raise Refused(
                f"mb={strategy.micro_batch} cuts a data rank's {samples} samples into {count} micro-batches: {reason}"
            )
        return count
    if schedules.FAMILIES[name].one_at_a_time:
        return 1
    allowed = [n for n in range(1, min(samples, BUSY * ranks) + 1) if schedules.refuse(name, ranks, n) is None]
    if not allowed:
        least = schedules.least_micro_batches(name, ranks)
        raise Refused(
            f"{strategy.stage_axis} needs at least {least} micro-batches, but a data rank has {samples} samples of a "
            f"global batch of {global_batch}; use a global batch of {least * strategy.data_ranks} or more, or pp:gpipe."
        )
    # A count that divides the samples is worth a few idle ranks, but not a pipeline that is never full.
    dividing = [n for n in allowed if samples % n == 0 and n >= ranks]
    return max(dividing or allowed)


def refuse_pipeline(strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
    """Why this pipeline cannot run, wherever the model is cut."""
    count = count_micro_batches(strategy, global_batch)
    if facts.batch_norms and count > 1:
        return (
            f"BatchNorm ({facts.batch_norms[0]}) normalises over a micro-batch, and {strategy} cuts every batch into "
            f"{count}, which changes the training; use GroupNorm or LayerNorm in the model, "
            f"layers={strategy.stage_ranks}, or a data strategy."
        )
    if strategy.offload == "params":
        return "offload=params is not built for a pipeline; use offload=optimizer."
    return None


def refuse_stages(strategy: Strategy, facts: ModelFacts, job: Job) -> str | None:
    """Why the model cannot be cut into stages; raises where it has too few layers."""
    from meshwright.strategies import data_strategy
    from meshwright.strategies.pipeline.stages import cut_stages

    lowers = strategy.number_format.is_low and not strategy.autocast and data_strategy(strategy).lowers
    if schedules.FAMILIES[strategy.schedule].splits_backward and lowers:
        return (
            f"{strategy.schedule} sums weight gradients of all micro-batches before {strategy.data} sees them, which "
            f"would happen in {strategy.precision}; use 1f1b or interleaved, ddp, or fp32."
        )
    stages = cut_stages(facts, count_stages(strategy), job.stages)
    if strategy.engine == "deepspeed":
        from meshwright.recording.blueprint import model_to_read
        from meshwright.strategies.deepspeed.pipeline import cut_layers

        cut_layers(model_to_read(job.model), facts, stages)
    return None
