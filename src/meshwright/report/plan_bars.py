"""Bar charts of a ranking: memory against the device's limit, and time."""

from __future__ import annotations

from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.planner.account import usable
from meshwright.report import colours
from meshwright.report.bars import Chart, Lane, Quantity
from meshwright.units import gib, show_seconds

MEMORY = Quantity(
    key="memory",
    unit="GiB",
    colours=colours.MEMORY,
    total=lambda size: f"{size:,.1f} GiB",
    exact=lambda size: f"{size:,.3f} GiB",
)
TIME = Quantity(
    key="time",
    unit="ms",
    colours=colours.TIME,
    total=lambda ms: show_seconds(ms / 1e3),
    exact=lambda ms: f"{ms:,.2f} ms",
)


def memory_chart(document: dict[str, Any]) -> Chart:
    """Reserved memory of each plan's fullest rank, and the device's limit if it is known."""
    room = memory_room(document["cluster"])
    known = f"The dashed line is the device memory available to tensors: {room:,.1f} GiB." if room else ""
    note = f"At the peak of a step, on the fullest rank. {known}".strip()
    return _chart("Memory by cause", note, MEMORY, document["plans"], limit=room)


def time_chart(document: dict[str, Any]) -> Chart:
    """One step of each plan."""
    note = "One optimizer step over the global batch; communication overlapped with compute is not counted."
    return _chart("Time by cause", note, TIME, document["plans"])


def memory_room(cluster: str) -> float | None:
    """GiB per device available to tensors; None if the cluster's text does not say."""
    try:
        parsed = Cluster.parse(cluster)
        # CPU ranks share a machine, and its memory is known only there.
        return None if parsed.device == "cpu" else gib(usable(hardware_of(parsed)))
    except MeshwrightError:
        return None


def _chart(title: str, note: str, quantity: Quantity, plans: list[dict[str, Any]], limit: float | None = None) -> Chart:
    bars = [quantity.bar(plan[quantity.key], float(sum(plan[quantity.key].values()))) for plan in plans]
    return Chart(
        title=title,
        note=note,
        unit=quantity.unit,
        lanes=tuple(
            Lane(strategy=plan["strategy"], total=bar.total, bars={"": bar})
            for plan, bar in zip(plans, bars, strict=True)
        ),
        colours={"": quantity.colours_of(bars)},
        limit=limit,
    )
