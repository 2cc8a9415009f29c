"""Approximate a strategy by what another framework can express: each rule may give up one term."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import ExchangeError
from meshwright.exchange.export_request import ExportRequest, Unsupported
from meshwright.facts.data_axis import find_traits
from meshwright.facts.grammar import show_data, show_offload
from meshwright.facts.model_axis import AxisTerm
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import Strategy

Rule = Callable[[Strategy], Unsupported | None]
"""Sees the strategy as the earlier rules left it; returns what it gives up, or None."""


def approximate(request: ExportRequest, rules: Iterable[Rule]) -> tuple[Strategy, tuple[Unsupported, ...]]:
    """The strategy that the file will express, and what was given up."""
    strategy, losses = request.strategy, []
    if not strategy.traits.foreign:
        raise ExchangeError(
            f"{show_data(strategy)} cannot be exported: other frameworks have nothing like it; name a data axis that "
            "they have, such as ddp or fsdp."
        )
    for rule in rules:
        while (loss := rule(strategy)) is not None:
            losses.append(loss)
            strategy = change(strategy, loss.becomes, request.ranks)
            if "axes" not in loss.becomes:  # a rule may apply to several axes
                break
    return strategy, tuple(losses)


def change(strategy: Strategy, becomes: Mapping[str, Any], ranks: int) -> Strategy:
    """The strategy with fields replaced. The ranks of a dropped axis go to the data axis."""
    sized = find_traits(becomes.get("data", strategy.data)).sized
    changed = replace(strategy, **{"data_size": strategy.data_size if sized else None, **becomes})
    if not sized:
        return changed.resolve(ranks)
    return replace(changed, data_size=ranks // changed.model_ranks)


def axes_missing_in(framework: str) -> Rule:
    """Drop the model axes that a framework's config does not have."""

    def rule(strategy: Strategy) -> Unsupported | None:
        for term in reversed(strategy.axes):
            if framework in term.traits.missing:
                return _drop_axis(strategy, term, term.traits.missing[framework])
            if framework not in term.traits.config_fields:
                raise ExchangeError(f"{term} cannot be exported: {framework} has nothing like it; drop the axis.")
        return None

    return rule


def drop_axes(why: str) -> Rule:
    """Drop all remaining model axes."""
    return lambda strategy: _drop_axis(strategy, strategy.axes[-1], why) if strategy.axes else None


def _drop_axis(strategy: Strategy, term: AxisTerm, why: str) -> Unsupported:
    left = tuple(other for other in strategy.axes if other != term)
    return Unsupported(term=str(term), says=f"{why}; its ranks went to the data axis", becomes={"axes": left})


def _rule(found: Callable[[Strategy], bool], why: str, term: Callable[[Strategy], str], **becomes: Any) -> Rule:
    """Replace fields of a strategy for which `found` holds."""
    return lambda strategy: Unsupported(term=term(strategy), says=why, becomes=becomes) if found(strategy) else None


def drop(field: str, default: Any, why: str, *, head: str = "") -> Rule:
    """Reset a policy to its default."""
    name = head or field

    def term(strategy: Strategy) -> str:
        value = getattr(strategy, field)
        return name if value is True else f"{name}={value}"

    return _rule(lambda strategy: getattr(strategy, field) != default, why, term, **{field: default})


def as_data(found: Callable[[Strategy], bool], data: str | None, why: str, *, variant: str = "") -> Rule:
    """Replace the data axis."""
    return _rule(found, why, show_data, data=data, variant=variant, hsdp_replicas=None)


def becomes_precision(found: Callable[[Strategy], bool], precision: str, why: str) -> Rule:
    """Replace the precision; only a low one can still be pure."""

    def rule(strategy: Strategy) -> Unsupported | None:
        pure = strategy.pure and FORMATS[precision].is_low
        return _rule(found, why, lambda s: s.precision, precision=precision, pure=pure)(strategy)

    return rule


def impure(found: Callable[[Strategy], bool], why: str) -> Rule:
    """Keep master weights, which the file cannot leave out."""
    return _rule(lambda s: s.pure and found(s), why, lambda s: f"{s.precision}:pure", pure=False)


def without_autocast(found: Callable[[Strategy], bool], why: str) -> Rule:
    """Drop autocast, for which the file has no word besides the precision."""
    return _rule(lambda s: s.autocast and found(s), why, lambda s: f"{s.precision}:autocast", autocast=False)


def offloaded(found: Callable[[Strategy], bool], offload: str, why: str) -> Rule:
    """Offload something else, or nothing."""
    return _rule(lambda s: s.offload not in ("", offload) and found(s), why, show_offload, offload=offload, nvme="")


def replicates(strategy: Strategy) -> bool:
    """Whether the data axis only replicates, which others call DDP."""
    return strategy.traits.sized and not strategy.traits.shards


def one_rank(strategy: Strategy) -> bool:
    """Whether the data strategy has one rank, so that it sums and shards nothing."""
    return strategy.data_size == 1 and strategy.reduced_ranks == 1


def zero_alone(strategy: Strategy) -> bool:
    """Whether the data axis is a stage of ZeRO that keeps parameters whole, which only DeepSpeed has."""
    return bool(strategy.traits.zero_stage) and not strategy.traits.gathers


PLAIN_WORDS: tuple[Rule, ...] = (
    drop("graphs", False, "the config has no word for CUDA graphs"),
    drop("loss", "whole", "the config does not say how the loss is computed"),
    drop("sync", "each", "the config does not say when gradients of several micro-batches are reduced"),
    as_data(lambda s: s.traits.many_devices, "ddp", "there is no single process for all devices; it is ddp"),
    as_data(lambda s: s.traits.gathers and not s.traits.shards, "ddp", "it is ddp there"),
    as_data(lambda s: s.traits.hybrid and s.replicas == 1, "fsdp", "one replica alone is fsdp there"),
    as_data(lambda s: s.traits.hybrid and s.shards == 1, "ddp", "replicas of a single shard are ddp there"),
)
"""What no other framework's config says, and data axes that they know under another name."""
