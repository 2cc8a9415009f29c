"""From a strategy to what another framework can say: rules, tried in order, each of which may give one term up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshwright.exchange.errors import ExchangeError
from meshwright.exchange.export_request import ExportRequest, Unsupported
from meshwright.facts.data_axis import find_traits
from meshwright.facts.grammar import show_data
from meshwright.facts.model_axis import AxisTerm
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import Strategy

Rule = Callable[[Strategy], Unsupported | None]
"""Looks at the strategy as the rules before it left it."""


def approximate(request: ExportRequest, rules: Iterable[Rule]) -> tuple[Strategy, tuple[Unsupported, ...]]:
    """The strategy as the file will have it, and what was given up on the way."""
    strategy, losses = request.strategy, []
    if not strategy.traits.foreign:
        raise ExchangeError(
            f"{show_data(strategy)} was to be exported, but other frameworks have nothing like it; name a data axis "
            "that they have, as ddp or fsdp."
        )
    for rule in rules:
        while (loss := rule(strategy)) is not None:
            losses.append(loss)
            strategy = change(strategy, loss.becomes, request.ranks)
            if "axes" not in loss.becomes:  # only axes are given up one by one
                break
    return strategy, tuple(losses)


def change(strategy: Strategy, becomes: Mapping[str, Any], ranks: int) -> Strategy:
    """The strategy with other fields. Ranks that an axis gives up go to the data axis."""
    sized = find_traits(becomes.get("data", strategy.data)).sized
    changed = replace(strategy, **{"data_size": strategy.data_size if sized else None, **becomes})
    if not sized:
        return changed.resolve(ranks)
    return replace(changed, data_size=ranks // changed.model_ranks)


def axes_missing_in(framework: str) -> Rule:
    """Gives up the model axes that a framework's config does not have."""

    def rule(strategy: Strategy) -> Unsupported | None:
        for term in reversed(strategy.axes):
            if framework in term.traits.missing:
                return _drop_axis(strategy, term, term.traits.missing[framework])
            if framework not in term.traits.config_fields:
                raise ExchangeError(f"{term} was to be exported, but {framework} has nothing like it; drop the axis.")
        return None

    return rule


def drop_axes(why: str) -> Rule:
    """Gives up all model axes that are left."""
    return lambda strategy: _drop_axis(strategy, strategy.axes[-1], why) if strategy.axes else None


def _drop_axis(strategy: Strategy, term: AxisTerm, why: str) -> Unsupported:
    left = tuple(other for other in strategy.axes if other != term)
    return Unsupported(term=str(term), says=f"{why}; its ranks went to the data axis", becomes={"axes": left})


def drop(field: str, default: Any, why: str, *, head: str = "") -> Rule:
    """Sets a policy back to its default."""

    def rule(strategy: Strategy) -> Unsupported | None:
        value = getattr(strategy, field)
        if value == default:
            return None
        term = head or field
        return Unsupported(term=term if value is True else f"{term}={value}", says=why, becomes={field: default})

    return rule


def as_data(found: Callable[[Strategy], bool], data: str | None, why: str, *, variant: str = "") -> Rule:
    """Another data axis than the one that was found."""

    def rule(strategy: Strategy) -> Unsupported | None:
        if not found(strategy):
            return None
        becomes = {"data": data, "variant": variant, "hsdp_replicas": None}
        return Unsupported(term=show_data(strategy), says=why, becomes=becomes)

    return rule


def becomes_precision(found: Callable[[Strategy], bool], precision: str, why: str) -> Rule:
    """Another precision than the one that was found; without master weights only where it is a small one."""

    def rule(strategy: Strategy) -> Unsupported | None:
        if not found(strategy):
            return None
        pure = strategy.pure and FORMATS[precision].is_low
        return Unsupported(term=strategy.precision, says=why, becomes={"precision": precision, "pure": pure})

    return rule


def impure(found: Callable[[Strategy], bool], why: str) -> Rule:
    """Keeps master weights where the file cannot leave them out."""

    def rule(strategy: Strategy) -> Unsupported | None:
        if not (strategy.pure and found(strategy)):
            return None
        return Unsupported(term=f"{strategy.precision}:pure", says=why, becomes={"pure": False})

    return rule


def without_autocast(found: Callable[[Strategy], bool], why: str) -> Rule:
    """The plain word for a precision where the file has no other for autocast."""

    def rule(strategy: Strategy) -> Unsupported | None:
        if not (strategy.autocast and found(strategy)):
            return None
        return Unsupported(term=f"{strategy.precision}:autocast", says=why, becomes={"autocast": False})

    return rule


def offloaded(found: Callable[[Strategy], bool], offload: str, why: str) -> Rule:
    """Something else leaves the device, or nothing."""

    def rule(strategy: Strategy) -> Unsupported | None:
        if strategy.offload in ("", offload) or not found(strategy):
            return None
        folder = f":{strategy.nvme}" if strategy.nvme else ""
        becomes = {"offload": offload, "nvme": ""}
        return Unsupported(term=f"offload={strategy.offload}{folder}", says=why, becomes=becomes)

    return rule


def replicates(strategy: Strategy) -> bool:
    """Whether its data axis is plain replicas, which others call DDP."""
    return strategy.traits.sized and not strategy.traits.shards


def zero_alone(strategy: Strategy) -> bool:
    """Whether its data axis is a stage of ZeRO that keeps parameters whole, which only DeepSpeed has."""
    return bool(strategy.traits.zero_stage) and not strategy.traits.gathers


PLAIN_WORDS: tuple[Rule, ...] = (
    as_data(lambda s: s.traits.many_devices, "ddp", "one process for all devices is not known there; it is ddp"),
    as_data(lambda s: s.traits.gathers and not s.traits.shards, "ddp", "it is ddp there"),
    as_data(lambda s: s.traits.hybrid and s.replicas == 1, "fsdp", "one replica alone is fsdp there"),
    as_data(lambda s: s.traits.hybrid and s.shards == 1, "ddp", "replicas of a single shard are ddp there"),
)
"""Data axes that are others by another name."""
