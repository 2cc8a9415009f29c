"""How far forecasts were from measurements, by grade, axes and number of nodes, and what was never measured.

`error_bars.json` holds the table, which `benchmarks/error_bars.py` writes from measured runs. A bar is the share within
which three in four runs of a cell were forecast. The JSON also says how often a bar covered the runs of a source that
it was made without.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from meshwright.facts.catalogue import catalogue_name
from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import AxisTerm

COVERAGE = 0.75
"""Share of runs that a bar is to cover."""
SCALES = (1, 4, 16, 64)
"""Most nodes of each class of scale."""
TABLE = Path(__file__).with_name("error_bars.json")
QUANTITIES = ("memory", "time")
DATA = "data"
"""Axes of a strategy that divides no model: a data axis, or one device."""


@dataclass(frozen=True)
class Scope:
    """What the error of a forecast depends on."""

    words: frozenset[str]
    """Words of the axes that divide the model, such as `tp`."""
    nodes: int
    device: str
    """The catalogue's name."""

    @property
    def kind(self) -> str:
        """Kind of device: CPU ranks have other costs than GPUs."""
        return "cpu" if self.device == "cpu" else "gpu"

    @property
    def axes(self) -> str:
        return "+".join(sorted(self.words)) or DATA

    @property
    def scale(self) -> int:
        """The class of scale: its most nodes."""
        return scale_of(self.nodes)


@dataclass(frozen=True)
class Expected:
    """Errors to expect of a forecast, as shares, and in what it is outside of all measured runs."""

    bar: Mapping[str, float]
    untested: tuple[str, ...] = ()


def scale_of(nodes: int) -> int:
    return next((most for most in SCALES if nodes <= most), SCALES[-1])


@cache
def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def scope_of(axes: Iterable[AxisTerm], cluster: Cluster) -> Scope:
    """The scope of a strategy's axes on a cluster; axes of one rank divide nothing."""
    words = frozenset(term.word for term in axes if term.size > 1)
    return Scope(words, cluster.nodes, _device(cluster.device))


@lru_cache(maxsize=64)
def _device(name: str) -> str:
    return catalogue_name(name) or name


@lru_cache(maxsize=4096)
def expected_error(grade: str, scope: Scope) -> Expected:
    """The bars of a forecast. Outside of what was measured they are those of the widest cell that resembles it."""
    return read_bars(_table(), grade, scope)


def read_bars(table: Mapping[str, Any], grade: str, scope: Scope) -> Expected:
    """The same from a given table."""
    cells = [cell for cell in table["cells"] if cell["grade"] == grade]
    bar = {quantity: _bar(cells, scope, quantity) for quantity in QUANTITIES}
    return Expected(bar, _untested(table, scope))


def _bar(cells: list[Any], scope: Scope, quantity: str) -> float:
    """That of the scope's own cell; else of the next larger scale of its axes, the next smaller, the widest of all."""
    known = [cell for cell in cells if quantity in cell]
    known = [cell for cell in known if cell["on"] == scope.kind] or known
    own = {cell["nodes"]: cell[quantity]["bar"] for cell in known if cell["axes"] == scope.axes}
    if not own:
        return float(max(cell[quantity]["bar"] for cell in known))
    larger, smaller = [most for most in own if most >= scope.scale], [most for most in own if most < scope.scale]
    if larger:
        return float(own[min(larger)])
    return float(max(own[most] for most in smaller))


def _untested(table: Mapping[str, Any], scope: Scope) -> tuple[str, ...]:
    """Sentences that say in what a forecast is outside of all measured runs."""
    found = []
    if scope.device not in table["devices"]:
        found.append(f"No run on {scope.device} was compared with a forecast, only on {', '.join(table['devices'])}.")
    most = table["most_nodes"].get(scope.axes)
    named = scope.axes.replace("+", " with ") if scope.words else "a data axis alone"
    if most is None:
        found.append(f"No run with {named} was compared with a forecast.")
    elif scope.nodes > most:
        found.append(f"No run with {named} on more than {most} node{'s' * (most > 1)} was compared with a forecast.")
    return tuple(found)
