"""Bars of a comparison, measured over forecast: what its page draws, with every width and label settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.facts.forecast import MEMORY_CAUSES
from meshwright.planner.explain import CAUSES
from meshwright.report.plan_bars import Bar, Part, Quantity
from meshwright.units import MIB, show_bytes, show_seconds

Row = dict[str, Any]

TIME = Quantity(
    key="time", causes=tuple(CAUSES), total=lambda ms: show_seconds(ms / 1e3), exact=lambda ms: f"{ms:,.2f} ms"
)
MEMORY = Quantity(
    key="memory", causes=MEMORY_CAUSES, total=lambda size: show_bytes(size * MIB), exact=lambda size: f"{size:,.3f} MiB"
)
ALIKE = {"exposed communication": "data", "other": "host", "rest": "allocator"}
"""What is measured under a name of its own has the colour of the forecast's cause that it is nearest to."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One strategy: what it took, and what had been foretold."""

    strategy: str
    measured: Bar
    forecast: Bar | None
    off: str
    """How far the forecast is off; empty if there is none."""

    @property
    def words(self) -> str:
        """Both for those who do not see them."""
        told = f"; forecast {self.forecast.words}, {self.off}" if self.forecast else ""
        return f"measured {self.measured.words}{told}"


@dataclass(frozen=True, kw_only=True)
class PairChart:
    """Pairs on one scale."""

    title: str
    note: str
    pairs: tuple[Pair, ...]
    legends: tuple[tuple[str, Mapping[str, str]], ...]
    """For measured and forecast: the causes that occur, with the style's names of their colours."""


def time_chart(rows: Sequence[Row]) -> PairChart:
    note = (
        "The median step, its causes by shares of a profiled step: computing, communication while nothing computes, "
        "and the rest. Below it, thinner, the planner's forecast."
    )
    return _chart("Time by cause", note, TIME, rows, "step_ms")


def memory_chart(rows: Sequence[Row]) -> PairChart:
    note = (
        "At the peak of the fullest rank, without what its process takes anyway. Parameters, gradients and optimizer "
        "are counted; the rest is activations, buffers and what the allocator keeps. Below it, thinner, the forecast."
    )
    return _chart("Memory by cause", note, MEMORY, rows, "peak_mib")


def _chart(title: str, note: str, quantity: Quantity, rows: Sequence[Row], total: str) -> PairChart:
    foretold = [row["forecast"] for row in rows if _has(row["forecast"], quantity)]
    scale = max((sum(parts[quantity.key].values()) for parts in (*rows, *foretold)), default=0.0) or 1.0
    return PairChart(
        title=title,
        note=note,
        pairs=tuple(_pair(row, quantity, scale, total) for row in rows),
        legends=(("measured", _legend(rows, quantity)), ("forecast", _legend(foretold, quantity))),
    )


def _has(forecast: Row | None, quantity: Quantity) -> bool:
    return bool(forecast and forecast.get(quantity.key))


def _pair(row: Row, quantity: Quantity, scale: float, total: str) -> Pair:
    forecast = row["forecast"] if _has(row["forecast"], quantity) else None
    off = (forecast or {}).get("error", {}).get("time" if quantity is TIME else "memory")
    return Pair(
        strategy=row["strategy"],
        measured=_bar(row["strategy"], row[quantity.key], row[total], quantity, scale),
        forecast=None
        if forecast is None
        else _bar(row["strategy"], forecast[quantity.key], forecast[total], quantity, scale),
        off="" if off is None else f"{off:+.0%}",
    )


def _bar(strategy: str, amounts: Mapping[str, float], total: float, quantity: Quantity, scale: float) -> Bar:
    parts = tuple(
        Part(
            cause=cause,
            colour=_colour(cause, quantity),
            width=100 * amount / scale,
            amount=quantity.exact(amount),
            share=f"{amount / total:.1%}" if total else "",
        )
        for cause, amount in amounts.items()
        if amount > 0
    )
    return Bar(strategy=strategy, total=quantity.total(total), parts=parts)


def _legend(holders: Sequence[Row], quantity: Quantity) -> dict[str, str]:
    causes = dict.fromkeys(cause for one in holders for cause, amount in one[quantity.key].items() if amount > 0)
    return {cause: _colour(cause, quantity) for cause in causes}


def _colour(cause: str, quantity: Quantity) -> str:
    known = ALIKE.get(cause, cause)
    place = quantity.causes.index(known) if known in quantity.causes else len(quantity.causes)
    return f"{quantity.key}-{place}"
