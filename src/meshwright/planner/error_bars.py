"""How far forecasts were from measurements, by grade, model, axes and number of nodes, and what was never measured.

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
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import AxisTerm

COVERAGE = 0.75
"""Share of runs that a bar is to cover."""
SCALES = (1, 4, 16, 64)
"""Most nodes of each class of scale."""
TABLE = Path(__file__).with_name("error_bars.json")
QUANTITIES = ("memory", "time")
DATA = "data"
"""Axes of a strategy that divides no model: a data axis, or one device."""
LANGUAGE, OTHER = "language", "other"
"""What is modelled: language, or anything else."""
MODELS = {LANGUAGE: "language models", OTHER: "models that are no language models"}


@dataclass(frozen=True)
class Scope:
    """What the error of a forecast depends on."""

    words: frozenset[str]
    """Words of the axes that divide the model, such as `tp`."""
    nodes: int
    device: str
    """The catalogue's name."""
    model: str
    """`LANGUAGE` or `OTHER`."""

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


def model_of(facts: ModelFacts) -> str:
    return LANGUAGE if facts.models_language else OTHER


def scope_of(axes: Iterable[AxisTerm], cluster: Cluster, model: str) -> Scope:
    """The scope of a strategy's axes on a cluster, for a model of a class; axes of one rank divide nothing."""
    words = frozenset(term.word for term in axes if term.size > 1)
    return Scope(words, cluster.nodes, _device(cluster.device), model)


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
    """That of the scope's own cell. Without one of its axes and model: the wider of its axes' bar for the other models,
    and the widest for its models. Without its axes: the widest of all."""
    known = [cell for cell in cells if quantity in cell]
    known = [cell for cell in known if cell["on"] == scope.kind] or known
    of_axes = [cell for cell in known if cell["axes"] == scope.axes]
    of_model = [cell for cell in known if cell["model"] == scope.model]
    if own := [cell for cell in of_axes if cell["model"] == scope.model]:
        return _at_scale(own, scope.scale, quantity)
    if of_axes:
        return max(_at_scale(of_axes, scope.scale, quantity), _widest(of_model, quantity))
    return _widest(known, quantity)


def _at_scale(cells: list[Any], scale: int, quantity: str) -> float:
    """The bar of a class of scale; else of the next larger one, else the widest of the smaller ones."""
    larger = [cell["nodes"] for cell in cells if cell["nodes"] >= scale]
    return _widest([cell for cell in cells if not larger or cell["nodes"] == min(larger)], quantity)


def _widest(cells: list[Any], quantity: str) -> float:
    return max((float(cell[quantity]["bar"]) for cell in cells), default=0.0)


def _untested(table: Mapping[str, Any], scope: Scope) -> tuple[str, ...]:
    """Sentences that say in what a forecast is outside of all measured runs."""
    found = []
    if scope.device not in table["devices"]:
        found.append(f"No run on {scope.device} was compared with a forecast, only on {', '.join(table['devices'])}.")
    if missing := _untested_axes(table["most_nodes"], scope):
        found.append(missing)
    return tuple(found)


def _untested_axes(most_nodes: Mapping[str, Mapping[str, int]], scope: Scope) -> str:
    """What is missing: any run with these axes on that many nodes, or one of such a model."""
    most = {model: most_nodes.get(model, {}).get(scope.axes, 0) for model in MODELS}
    own, largest = most[scope.model], max(most.values())
    named = scope.axes.replace("+", " with ") if scope.words else "a data axis alone"
    if scope.nodes <= own:
        return ""
    if scope.nodes <= largest:
        (others,) = (words for model, words in MODELS.items() if model != scope.model)
        return f"Only {others} with {named}{_beyond(own)} were compared with a forecast."
    return f"No run with {named}{_beyond(largest)} was compared with a forecast."


def _beyond(most: int) -> str:
    return f" on more than {most} node{'s' * (most > 1)}" if most else ""
