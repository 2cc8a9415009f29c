"""Divide a number of ranks among a strategy's axes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.errors import Refused, either
from meshwright.facts.grammar import show_data

if TYPE_CHECKING:
    from meshwright.facts.strategy import Strategy

_SHOWN = 3  # suggestions in one message


def fill_data_axis(strategy: Strategy, ranks: int) -> Strategy:
    """The strategy with its data axis named and sized for `ranks`; `Refused` if the sizes do not multiply to them."""
    if ranks < 1:
        raise Refused(f"{strategy} was given {ranks} ranks; give it at least 1.")
    if strategy.auto:
        raise Refused(f"{strategy} has no axes yet; let the planner choose them, or name a strategy such as ddp.")
    if strategy.traits.alone:
        if ranks == 1:
            return strategy
        raise Refused(f"{strategy} runs on 1 rank, but {ranks} were given; ddp is the simplest strategy for {ranks}.")
    if not _fits(strategy.model_ranks, strategy.data_size, ranks):
        raise Refused(_misfit(strategy, ranks))
    left = ranks // strategy.model_ranks
    if strategy.data is not None:
        return replace(strategy, data_size=left)
    if left > 1:
        return replace(strategy, data="ddp", data_size=left)
    # If the model's axes take every rank, a data axis of one rank would only add a name.
    return strategy if strategy.model_ranks > 1 else replace(strategy, data="single")


def _misfit(strategy: Strategy, ranks: int) -> str:
    least = strategy.model_ranks * (strategy.data_size or 1)
    need = f"{least} ranks" if strategy.data_size else f"a multiple of {least} ranks"
    given = "1 was given" if ranks == 1 else f"{ranks} were given"
    fits = [*_data_terms(strategy, ranks), *_model_terms(strategy, ranks)][:_SHOWN]
    advice = f"{either(fits)} would fit" if fits else f"give it {need}, or change more than one size"
    return f"{strategy} needs {need}, but {given}; {advice}."


def _data_terms(strategy: Strategy, ranks: int) -> list[str]:
    """Data axes that would fill the ranks that the model's axes leave, nearest size first."""
    left, over = divmod(ranks, strategy.model_ranks)
    if over or strategy.data_size is None:
        return []
    if strategy.hsdp_replicas is None:
        return [show_data(replace(strategy, data_size=left))]
    replicas = _nearest_first(divisors(left), strategy.hsdp_replicas)
    return [show_data(replace(strategy, data_size=left, hsdp_replicas=number)) for number in replicas]


def _model_terms(strategy: Strategy, ranks: int) -> list[str]:
    """Sizes of one model axis that would fit if all others stay; size 1 only if no other fits."""
    terms = []
    for axis in strategy.axes:
        others = strategy.model_ranks // axis.size
        fits = [n for n in divisors(ranks) if _fits(others * n, strategy.data_size, ranks)]
        split = [n for n in fits if n > 1] or fits
        terms += [f"{axis.word}={n}" for n in _nearest_first(split, axis.size)]
    return terms


def _fits(model_ranks: int, data_size: int | None, ranks: int) -> bool:
    left, over = divmod(ranks, model_ranks)
    return not over and data_size in (None, left)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest_first(sizes: list[int], wanted: int) -> list[int]:
    return sorted(sizes, key=lambda size: (abs(size - wanted), size))
