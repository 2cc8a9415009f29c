"""Which strategies an axis that lies inside the data axis goes with."""

from __future__ import annotations

from meshwright.facts.strategy import Strategy
from meshwright.strategies import DATA_STRATEGIES, data_strategy


def refuse_inside_data(strategy: Strategy) -> str | None:
    """Why an axis that lies inside the data axis does not go with the rest of a strategy; None if it does."""
    inside = next((term for term in strategy.axes if term.traits.splits_batch), None)
    if inside is None:
        return None
    technique = data_strategy(strategy)
    whole_copies = strategy.traits.gathers and not strategy.traits.shards
    if not technique.sums_apart or strategy.traits.hybrid or whole_copies or strategy.engine != "torch":
        able = ", ".join(w for w, one in DATA_STRATEGIES.items() if one.sums_apart and not one.traits.hybrid)
        asked = f"engine={strategy.engine}" if strategy.engine != "torch" else strategy.data
        return (
            f"{inside} divides parameters over data ranks, and {asked} sums all gradients over the same ranks; "
            f"use {inside} with {able}."
        )
    if strategy.offload:
        return f"offload={strategy.offload} is not built for {inside}; drop one of them from {strategy}."
    if strategy.graphs:
        return f"graphs is not built for {inside}; drop it from {strategy}."
    return None
