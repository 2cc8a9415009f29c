"""Where state that a forward pass moves would not end as in one process."""

from __future__ import annotations

from meshwright.facts.model import ModelFacts, MovedFacts
from meshwright.facts.strategy import Strategy


def refuse_moved(strategy: Strategy, facts: ModelFacts, micro_steps: int) -> str | None:
    """Why a strategy cannot be, with so many micro-batches in a step."""
    return next((reason for state in facts.moved if (reason := _reason(state, strategy, facts, micro_steps))), None)


def _reason(state: MovedFacts, strategy: Strategy, facts: ModelFacts, micro_steps: int) -> str | None:
    moves = f"The model's forward moves {state.name}"
    if state.by_samples and (strategy.data_ranks > 1 or micro_steps > 1 or strategy.splits_activations):
        part = f"{micro_steps} micro-batches" if micro_steps > 1 else "one rank's part of them"
        return (
            f"{moves} by the samples that it sees, and {part} would move it otherwise than the whole batch; use "
            "single, or leave it to a BatchNorm or to the optimizer to move it."
        )
    if micro_steps > 1:
        return (
            f"{moves}, which {strategy} would do {micro_steps} times in a step, once for each micro-batch; drop mb, "
            "and use layers in place of pp."
        )
    if strategy.recompute != "none" and _in_a_block(state, facts):
        return f"{moves}, and ac={strategy.recompute} would move it twice; drop ac."
    if strategy.traits.many_devices:
        return f"{moves}, which {strategy.data} does on copies that are thrown away; use ddp."
    return _parameter_reason(moves, state, strategy, facts) if state.parameter else None


def _parameter_reason(moves: str, state: MovedFacts, strategy: Strategy, facts: ModelFacts) -> str | None:
    if strategy.traits.gathers or strategy.model_ranks > 1 or strategy.engine != "torch":
        return f"{moves}, a parameter of which it sees a copy or a part under {strategy}; use ddp, zero1 or zero2."
    if strategy.number_format.is_low:
        return f"{moves}, a parameter of which it may see a rounded copy under {strategy.precision}; use fp32."
    trained = any(p.trainable and state.name in p.names for p in facts.parameters)
    if strategy.offload and trained:
        return f"{moves}, a parameter of which offload={strategy.offload} keeps another copy; drop offload."
    return None


def _in_a_block(state: MovedFacts, facts: ModelFacts) -> bool:
    """Whether it lies in what is recomputed: the blocks, or else the model."""
    return not facts.blocks or any(state.name.startswith(f"{block}.") for block in facts.blocks)
