"""Refuse strategies under which linear layers cannot multiply in float8."""

from __future__ import annotations

from meshwright.facts.strategy import Strategy


def refuse_float8_axes(strategy: Strategy) -> str | None:
    """Why `fp8` cannot run under the strategy's axes and engine, or None."""
    word = strategy.precision
    if not strategy.number_format.factors:
        return None
    if strategy.engine != "torch":
        return f"{word} is built for our own engine, not for engine={strategy.engine}; use bf16, or drop the engine."
    if without := [term.word for term in strategy.inner_axes if not term.traits.float8]:
        axes = " and ".join(without)
        return f"{word} is not built for layers that {axes} divides; use bf16, or fsdp or pp in place of {axes}."
    return None
