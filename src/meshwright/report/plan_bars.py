"""Stacked bars of a ranking's plans: what the page draws, with every width and label settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.forecast import MEMORY_CAUSES
from meshwright.planner.account import usable
from meshwright.planner.explain import CAUSES
from meshwright.units import gib, show_seconds


@dataclass(frozen=True, kw_only=True)
class Part:
    """One cause's piece of a bar."""

    cause: str
    colour: str
    """The style's name for the colour; the same cause has the same one in every bar."""
    width: float
    """Per cent of the chart's width."""
    amount: str
    """The exact figure."""
    share: str
    """Of the whole bar."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    strategy: str
    total: str
    parts: tuple[Part, ...]

    @property
    def words(self) -> str:
        """The bar for those who do not see it."""
        return f"{self.strategy}: {self.total}; " + ", ".join(f"{part.cause} {part.amount}" for part in self.parts)

    def amount(self, cause: str) -> str:
        """The exact figure of a cause, which the bar may not have."""
        return next((part.amount for part in self.parts if part.cause == cause), "0")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Bars on one scale."""

    title: str
    note: str
    bars: tuple[Bar, ...]
    colours: Mapping[str, str]
    """Of the causes that occur, in the order in which they are stacked."""
    limit: float | None = None
    """Where the device's memory ends, in per cent of the chart's width."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """How one kind of figure is read from a plan and written."""

    key: str
    causes: Sequence[str]
    total: Callable[[float], str]
    exact: Callable[[float], str]


MEMORY = Quantity(
    key="memory", causes=MEMORY_CAUSES, total=lambda size: f"{size:,.1f} GiB", exact=lambda size: f"{size:,.3f} GiB"
)
TIME = Quantity(
    key="time", causes=tuple(CAUSES), total=lambda ms: show_seconds(ms / 1e3), exact=lambda ms: f"{ms:,.2f} ms"
)


def memory_chart(document: dict[str, Any]) -> Chart:
    """Reserved memory of each plan's fullest rank, and where the device's ends if that is known."""
    room = memory_room(document["cluster"])
    scale = max([_total(plan, MEMORY) for plan in document["plans"]] + ([room] if room else []))
    known = f"The dashed line is what a device has for tensors: {room:,.1f} GiB." if room else ""
    return Chart(
        title="Memory by cause",
        note=f"At the peak of a step, on the fullest rank. {known}".strip(),
        bars=tuple(_bar(plan, MEMORY, scale) for plan in document["plans"]),
        colours=_colours(document["plans"], MEMORY),
        limit=100 * room / scale if room and scale else None,
    )


def time_chart(document: dict[str, Any]) -> Chart:
    """One step of each plan."""
    scale = max(_total(plan, TIME) for plan in document["plans"])
    return Chart(
        title="Time by cause",
        note="One optimizer step over the global batch; communication that compute hides is not counted.",
        bars=tuple(_bar(plan, TIME, scale) for plan in document["plans"]),
        colours=_colours(document["plans"], TIME),
    )


def memory_room(cluster: str) -> float | None:
    """GiB that tensors can have of one device; None where the cluster's words do not tell."""
    try:
        parsed = Cluster.parse(cluster)
        # CPU ranks share a machine whose size only the machine knows.
        return None if parsed.device == "cpu" else gib(usable(hardware_of(parsed)))
    except MeshwrightError:
        return None


def _total(plan: dict[str, Any], quantity: Quantity) -> float:
    return float(sum(plan[quantity.key].values()))


def _bar(plan: dict[str, Any], quantity: Quantity, scale: float) -> Bar:
    total = _total(plan, quantity)
    parts = [
        Part(
            cause=cause,
            colour=_colour(cause, quantity),
            width=100 * amount / scale,
            amount=quantity.exact(amount),
            share=f"{amount / total:.1%}",
        )
        for cause, amount in _ordered(plan[quantity.key], quantity)
    ]
    return Bar(strategy=plan["strategy"], total=quantity.total(total), parts=tuple(parts))


def _ordered(amounts: Mapping[str, float], quantity: Quantity) -> list[tuple[str, float]]:
    """What there is of each cause, known causes first and in their own order."""
    order = {cause: place for place, cause in enumerate(quantity.causes)}
    found = [(cause, amount) for cause, amount in amounts.items() if amount > 0]
    return sorted(found, key=lambda part: order.get(part[0], len(order)))


def _colours(plans: Sequence[dict[str, Any]], quantity: Quantity) -> dict[str, str]:
    largest: dict[str, float] = {}
    for plan in plans:
        for cause, amount in plan[quantity.key].items():
            largest[cause] = max(amount, largest.get(cause, 0.0))
    return {cause: _colour(cause, quantity) for cause, _ in _ordered(largest, quantity)}


def _colour(cause: str, quantity: Quantity) -> str:
    place = quantity.causes.index(cause) if cause in quantity.causes else len(quantity.causes)
    return f"{quantity.key}-{place}"
