"""Stacked bars by cause on one scale, with every figure as it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.report.colours import UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Part:
    """One cause's piece of a bar."""

    cause: str
    colour: str
    """Its name in the page's style."""
    size: float
    amount: str
    """The exact figure."""
    share: str
    """Of the whole bar."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    total: str
    parts: tuple[Part, ...]

    def amount(self, cause: str) -> str:
        """The exact figure of a cause, which the bar may not have."""
        return next((part.amount for part in self.parts if part.cause == cause), "0")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One strategy with its bars, the thick one first."""

    strategy: str
    aside: str
    """What stands at the right of its name: the total."""
    bars: Mapping[str, Bar]
    """By kind: measured and forecast, or one that has no name."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lanes on one scale."""

    title: str
    note: str
    unit: str
    lanes: tuple[Lane, ...]
    colours: Mapping[str, Mapping[str, str]]
    """By kind: the causes that occur, in the order in which they are stacked."""
    limit: float | None = None
    """Where the device's memory ends."""

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Kinds and causes of all bars, for a table."""
        return [(kind, cause) for kind, causes in self.colours.items() for cause in causes]

    @property
    def words(self) -> str:
        """The chart for those who do not see it."""
        told = "; ".join(f"{lane.strategy} {lane.aside}" for lane in self.lanes)
        return f"{self.title}, a bar for each of {len(self.lanes)} strategies: {told}"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """How one kind of figure is read from a record and written."""

    key: str
    unit: str
    colours: Mapping[str, str]
    """Of the causes, in the order in which they are shown."""
    total: Callable[[float], str]
    exact: Callable[[float], str]

    def bar(self, amounts: Mapping[str, float], total: float) -> Bar:
        """What there is of each cause."""
        return Bar(
            total=self.total(total),
            parts=tuple(
                Part(
                    cause=cause,
                    colour=self.colours.get(cause, UNKNOWN),
                    size=amount,
                    amount=self.exact(amount),
                    share=f"{amount / total:.1%}" if total else "",
                )
                for cause, amount in amounts.items()
                if amount > 0
            ),
        )

    def colours_of(self, bars: Sequence[Bar]) -> dict[str, str]:
        """Of the causes that occur in some bars, those that are known first and in their own order."""
        order = {cause: place for place, cause in enumerate(self.colours)}
        found = {part.cause: part.colour for bar in bars for part in bar.parts}
        return {cause: found[cause] for cause in sorted(found, key=lambda cause: order.get(cause, len(order)))}
