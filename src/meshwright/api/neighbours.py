"""How near two strategies are: the number of terms that a user would change."""

from __future__ import annotations

from dataclasses import replace

from meshwright.facts.strategy import Strategy

_POLICIES = ("recompute", "offload", "sync", "loss", "compile", "graphs")


def changes(one: Strategy, other: Strategy) -> int:
    """The number of terms that differ: the data axis, each model axis, each policy and the micro-batch size."""
    data = int(_data(one) != _data(other))
    axes = {term.word: str(term) for term in one.axes}, {term.word: str(term) for term in other.axes}
    model = sum(axes[0].get(word) != axes[1].get(word) for word in axes[0].keys() | axes[1].keys())
    policies = sum(bool(getattr(one, name) != getattr(other, name)) for name in _POLICIES)
    return data + model + policies + int(_resized(one, other))


def plain_size(strategy: Strategy, global_batch: int) -> Strategy:
    """The strategy without a micro-batch size that is this rank's whole batch: it is cut nowhere."""
    whole = global_batch // strategy.data_ranks
    return (
        replace(strategy, micro_batch=None) if strategy.micro_batch == whole and not strategy.stage_axis else strategy
    )


def _data(strategy: Strategy) -> tuple[object, ...]:
    """Without its size, which follows from the other axes."""
    return strategy.data, strategy.variant, strategy.hsdp_replicas


def _resized(one: Strategy, other: Strategy) -> bool:
    chosen_by_us = (one.micro_batch is None and other.stage_axis) or (other.micro_batch is None and one.stage_axis)
    return one.micro_batch != other.micro_batch and not chosen_by_us
