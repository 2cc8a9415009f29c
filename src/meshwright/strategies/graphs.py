"""Refuse strategies and models whose forward and backward cannot be replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import DATA_STRATEGIES, data_strategy


def refuse_graphs(strategy: Strategy, facts: ModelFacts) -> str | None:
    """Why `graphs` cannot run, or None."""
    if not strategy.graphs:
        return None
    return next((f"graphs {reason}" for reason in _reasons(strategy, facts)), None)


def _reasons(strategy: Strategy, facts: ModelFacts) -> Iterator[str]:
    if strategy.axes:
        words = " and ".join(term.word for term in strategy.axes)
        yield f"is not built for {words}, which communicate inside of forward and backward; drop it from {strategy}."
    if strategy.engine != "torch":
        yield f"replays our own passes, and engine={strategy.engine} has its own; drop one of them."
    if not data_strategy(strategy).captures:
        able = [word for word, technique in DATA_STRATEGIES.items() if technique.captures]
        yield f"replays forward and backward without communication, which {strategy.data} needs; use {_or(able)}."
    if strategy.recompute != "none":
        yield f"cannot restore random states where blocks are recomputed; drop ac={strategy.recompute}, or graphs."
    if strategy.offload:
        yield f"needs everything on the device; drop offload={strategy.offload}, or graphs."
    if facts.batch_norms and strategy.data_ranks > 1:
        yield f"would have to replay the communication of a synchronised BatchNorm ({facts.batch_norms[0]}); drop it."
    if facts.moved:
        yield f"replays kernels and not Python, but the model's forward changes {facts.moved[0].name}; drop it."
    if facts.by_value:
        yield "replays the same kernels for every batch, but the model reads values of tensors as it runs; drop it."


def refuse_cut_losses(strategy: Strategy, facts: ModelFacts, parts: int) -> str | None:
    """Why `graphs` cannot cut a batch into `parts` if the loss is over the whole batch."""
    if strategy.graphs and facts.loss_over == "batch" and parts > 1:
        return (
            f"{strategy} cuts the batch into {parts} parts and gathers their outputs for a loss over the whole batch, "
            "which graphs does not replay; drop it."
        )
    return None


def _or(words: list[str]) -> str:
    return " or ".join(words)
