"""Stacked bars by cause on one scale, with exact figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.report import colours
from meshwright.units import show_seconds


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """One cause's segment of a bar."""

    cause: str
    colour: str
    """Name of a colour in the page's style."""
    size: float
    amount: str
    """The exact figure."""
    share: str
    """Share of the whole bar."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    total: str
    parts: tuple[BarPart, ...]

    def amount(self, cause: str) -> str:
        """The exact figure of a cause, "0" if the bar does not have it."""
        return next((part.amount for part in self.parts if part.cause == cause), "0")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One strategy with its bars, the thick one first."""

    strategy: str
    total: str
    """Shown to the right of its name."""
    bars: Mapping[str, Bar]
    """By kind: measured and forecast, or a single one with an empty name."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Several strategies on one scale."""

    title: str
    note: str
    unit: str
    lanes: tuple[Lane, ...]
    colours: Mapping[str, Mapping[str, str]]
    """By kind: the causes that occur, in stacking order."""
    limit: float | None = None
    """The device's memory, drawn as a line."""

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Kinds and causes of all bars, for a table."""
        return [(kind, cause) for kind, causes in self.colours.items() for cause in causes]

    @property
    def words(self) -> str:
        """Description of the chart for screen readers."""
        totals = "; ".join(f"{lane.strategy} {lane.total}" for lane in self.lanes)
        return f"{self.title}, a bar for each of {len(self.lanes)} strategies: {totals}"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """How one kind of figure is read from a record and printed."""

    key: str
    unit: str
    colours: Mapping[str, str]
    """Colours of the causes, in display order."""
    total: Callable[[float], str]
    exact: Callable[[float], str]

    def bar(self, amounts: Mapping[str, float], total: float) -> Bar:
        """A bar of the amounts by cause; causes without an amount are left out."""
        parts = (
            BarPart(
                cause=cause,
                colour=self.colours.get(cause, colours.UNKNOWN),
                size=amount,
                amount=self.exact(amount),
                share=f"{amount / total:.1%}" if total else "",
            )
            for cause, amount in amounts.items()
            if amount > 0
        )
        return Bar(total=self.total(total), parts=tuple(parts))

    def colours_of(self, bars: Sequence[Bar]) -> dict[str, str]:
        """Colours of the causes that occur in some bars: known causes first, in display order."""
        order = {cause: place for place, cause in enumerate(self.colours)}
        found = {part.cause: part.colour for bar in bars for part in bar.parts}
        return {cause: found[cause] for cause in sorted(found, key=lambda cause: order.get(cause, len(order)))}

    def chart(
        self, note: str, lanes: Sequence[Lane], *, kinds: Sequence[str] = ("",), limit: float | None = None
    ) -> Chart:
        """A chart of this quantity; it has room for bars of all `kinds`, even if no lane has one."""
        return Chart(
            title=f"{self.key.capitalize()} by cause",
            note=note,
            unit=self.unit,
            lanes=tuple(lanes),
            colours={kind: self.colours_of([lane.bars[kind] for lane in lanes if kind in lane.bars]) for kind in kinds},
            limit=limit,
        )


TIME = Quantity(
    key="time",
    unit="ms",
    colours=colours.TIME,
    total=lambda ms: show_seconds(ms / 1e3),
    exact=lambda ms: f"{ms:,.2f} ms",
)
