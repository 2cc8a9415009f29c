"""Make the planner's error bars from measured runs: `src/meshwright/planner/error_bars.json`.

    PYTHONPATH=src python benchmarks/error_bars.py published_rows.csv            # three minutes; writes the table
    PYTHONPATH=src python benchmarks/error_bars.py published_rows.csv --show     # only prints it

The runs are published ones, in the columns of `meshwright validate`, and the project's own on one H200 (scored by
`benchmarks/plan_gpu.py score --out docs/data/plan_gpu_scores.json`) and on CPU ranks. For each source, bars are made of
all other sources and held against its runs: the table says how many they cover.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.api.validate import validate_rows
from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import AxisTerm, Strategy
from meshwright.planner.error_bars import COVERAGE, TABLE, Scope, read_bars, scope_of
from meshwright.planner.scores import ScoredRun

DATA = Path(__file__).parents[1] / "docs" / "data"
LEAST = 10
"""Runs of a cell below which it gets no bar of its own."""
GRADES = ("account", "trace")


@dataclass(frozen=True)
class Observed:
    """The errors of one forecast, as shares."""

    source: str
    grade: str
    scope: Scope
    errors: dict[str, float]
    """By quantity; what was not measured is missing."""


def published(outcomes: Iterable[ScoredRun]) -> list[Observed]:
    """Published runs. One model of one source is a source: what was fitted to one may fail for another."""
    found = []
    for outcome in outcomes:
        errors = {"memory": outcome.memory_error, "time": outcome.time_error}
        known = {quantity: error for quantity, error in errors.items() if error is not None}
        row = outcome.row
        scope = scope_of((AxisTerm(word, 2) for word in row.axes), row.cluster)
        found.append(Observed(f"{row.columns.get('source', '')} {row.arch}", "account", scope, known))
    return found


def on_one_h200(path: Path = DATA / "plan_gpu_scores.json") -> list[Observed]:
    """One rank of many worlds: what it reserves, and its own work. Nothing was sent, so it counts as one node."""
    found = []
    for row in json.loads(path.read_text())["rows"]:
        scope = scope_of(Strategy.parse(row["strategy"]).axes, Cluster(device="H200-141GB"))
        source, errors = f"one H200, {row['job'].partition(',')[0].partition(':batch')[0]}", row["errors"]
        found.append(Observed(source, "account", scope, {"memory": errors["accounted"], "time": errors["time"]}))
        found.append(Observed(source, "trace", scope, {"memory": errors["reserved"]}))
    return found


def on_cpu_ranks(path: Path = DATA / "planner_on_links.json") -> list[Observed]:
    """Steps of CPU ranks on a link of a set rate; their memory was not measured."""
    document = json.loads(path.read_text())
    found = []
    for name, cell in document["cells"].items():
        cluster = Cluster(nodes=document["clusters"][str(cell["gigabits"])]["nodes"], device="cpu")
        for row in (row for row in cell["rows"] if "forecast" in row and "seconds" in row):
            scope, error = scope_of(Strategy.parse(row["strategy"]).axes, cluster), row["forecast"] / row["seconds"] - 1
            found.append(Observed(f"CPU ranks, {name}", "account", scope, {"time": error}))
    return found


def table_of(observed: Iterable[Observed]) -> dict[str, Any]:
    """Cells with bars, and what was measured at all. A trace's time is the account's."""
    rows = list(observed)
    cells: dict[tuple[str, str, str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for quantity, error in row.errors.items():
            for grade in GRADES if quantity == "time" else (row.grade,):
                cells[grade, row.scope.kind, row.scope.axes, row.scope.scale][quantity].append(abs(error))
    most: dict[str, int] = {}
    for row in rows:
        most[row.scope.axes] = max(most.get(row.scope.axes, 0), row.scope.nodes)
    return {
        "devices": sorted({row.scope.device for row in rows}),
        "most_nodes": dict(sorted(most.items())),
        "cells": [_cell(key, errors) for key, errors in sorted(cells.items()) if _is_known(errors)],
    }


def _is_known(errors: dict[str, list[float]]) -> bool:
    return any(len(found) >= LEAST for found in errors.values())


def _cell(key: tuple[str, str, str, int], errors: dict[str, list[float]]) -> dict[str, Any]:
    cell: dict[str, Any] = dict(zip(("grade", "on", "axes", "nodes"), key, strict=True))
    for quantity, found in sorted(errors.items()):
        if len(found) >= LEAST:
            cell[quantity] = {"bar": round(_quantile(found, COVERAGE), 3), "runs": len(found)}
    return cell


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def held_out(observed: list[Observed]) -> dict[str, Any]:
    """For each grade and quantity, the share of runs that bars made without their source cover."""
    hits: dict[str, dict[str, list[bool]]] = {grade: defaultdict(list) for grade in GRADES}
    for source in sorted({row.source for row in observed}):
        table = table_of(row for row in observed if row.source != source)
        for row in observed:
            if row.source == source:
                bar = read_bars(table, row.grade, row.scope).bar
                for quantity, error in row.errors.items():
                    hits[row.grade][quantity].append(abs(error) <= bar[quantity])
    return {
        grade: {name: {"runs": len(found), "covered": round(sum(found) / len(found), 3)} for name, found in of.items()}
        for grade, of in hits.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="published runs")
    parser.add_argument("--show", action="store_true", help="print the table instead of writing it")
    options = parser.parse_args()
    observed = [*published(validate_rows(options.rows)), *on_one_h200(), *on_cpu_ranks()]
    document = {"coverage": COVERAGE, "held_out": held_out(observed), **table_of(observed)}
    text = show(document)
    print(text)
    if not options.show:
        TABLE.write_text(text + "\n")


def show(document: dict[str, Any]) -> str:
    """JSON with one cell a line."""
    cells = ",\n".join(f"  {json.dumps(cell)}" for cell in document["cells"])
    rest = [f' "{name}": {json.dumps(value)}' for name, value in document.items() if name != "cells"]
    return "{\n" + ",\n".join(rest) + f',\n "cells": [\n{cells}\n ]\n}}'


if __name__ == "__main__":
    main()
