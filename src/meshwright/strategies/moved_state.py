"""Refuse strategies under which state that a forward pass changes would end up different than in one process."""

from __future__ import annotations

from meshwright.facts.model import ModelFacts, MovedFacts
from meshwright.facts.strategy import Strategy


def refuse_moved(strategy: Strategy, facts: ModelFacts, micro_steps: int) -> str | None:
    """Why a strategy with `micro_steps` per step would change the state differently; None if it would not."""
    return next((reason for state in facts.moved if (reason := _reason(state, strategy, facts, micro_steps))), None)


def _reason(state: MovedFacts, strategy: Strategy, facts: ModelFacts, micro_steps: int) -> str | None:
    changes = f"The model's forward changes {state.name}"
    if state.by_samples and (strategy.data_ranks > 1 or micro_steps > 1 or strategy.splits_activations):
        part = f"{micro_steps} micro-batches" if micro_steps > 1 else "one rank's part of them"
        return (
            f"{changes} by the samples that it sees, and {part} would change it differently than the whole batch; use "
            "single, or let a BatchNorm or the optimizer change it."
        )
    if micro_steps > 1:
        return (
            f"{changes}, which {strategy} would do {micro_steps} times in a step, once for each micro-batch; drop mb, "
            "and use layers in place of pp."
        )
    if strategy.recompute != "none" and _in_a_block(state, facts):
        return f"{changes}, and ac={strategy.recompute} would change it twice; drop ac."
    if strategy.traits.many_devices:
        return f"{changes}, which {strategy.data} does on copies that are thrown away; use ddp."
    return _parameter_reason(changes, state, strategy, facts) if state.parameter else None


def _parameter_reason(changes: str, state: MovedFacts, strategy: Strategy, facts: ModelFacts) -> str | None:
    if strategy.traits.gathers or strategy.model_ranks > 1 or strategy.engine != "torch":
        return f"{changes}, a parameter of which it sees a copy or a part under {strategy}; use ddp, zero1 or zero2."
    if strategy.number_format.is_low:
        return f"{changes}, a parameter of which it may see a rounded copy under {strategy.precision}; use fp32."
    trained = any(p.trainable and state.name in p.names for p in facts.parameters)
    if strategy.offload and trained:
        return f"{changes}, a parameter of which offload={strategy.offload} keeps another copy; drop offload."
    return None


def _in_a_block(state: MovedFacts, facts: ModelFacts) -> bool:
    """Whether the state is recomputed: it is in a block, or the whole model is recomputed."""
    return not facts.blocks or any(state.name.startswith(f"{block}.") for block in facts.blocks)
