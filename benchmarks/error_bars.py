"""Make the planner's error bars from measured runs: `src/meshwright/planner/error_bars.json`.

    PYTHONPATH=src python benchmarks/error_bars.py published_rows.csv            # three minutes; writes the table
    PYTHONPATH=src python benchmarks/error_bars.py published_rows.csv --show     # only prints it

The runs are published ones, in the columns of `meshwright validate`, and the project's own: on one H200 (scored by
`benchmarks/plan_gpu.py score --out docs/data/plan_gpu_scores.json`), in blind rounds on one H200 (scored by
`benchmarks/unseen_gpu.py score --out docs/data/unseen_scores.json`) and on CPU ranks. For each source, bars are made of
all other sources and held against its runs: the table says how many they cover, of all models and of each class.
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
from meshwright.planner.error_bars import COVERAGE, LANGUAGE, MODELS, TABLE, Scope, read_bars, scope_of
from meshwright.planner.scores import ScoredRun

DATA = Path(__file__).parents[1] / "docs" / "data"
LEAST = 10
"""Runs of a cell below which it gets no bar of its own."""
GRADES = ("account", "trace")
BLIND = "blind"
"""Begins the source of a run of a blind round."""
H200 = Cluster(device="H200-141GB")
"""One rank of each world was measured on it, and sent nothing, so all count as one node."""
Key = tuple[str, str, str, str, int]
"""Of a cell: grade, kind of device, class of models, axes and class of scale."""


@dataclass(frozen=True)
class Observed:
    """The errors of one forecast, as shares."""

    source: str
    grade: str
    scope: Scope
    errors: dict[str, float]
    """By quantity; what was not measured is missing."""


def published(outcomes: Iterable[ScoredRun]) -> list[Observed]:
    """Published runs, all of language models. One model of one source is a source: what was fitted to one may fail for
    another."""
    found = []
    for outcome in outcomes:
        errors = {"memory": outcome.memory_error, "time": outcome.time_error}
        known = {quantity: error for quantity, error in errors.items() if error is not None}
        row = outcome.row
        scope = scope_of((AxisTerm(word, 2) for word in row.axes), row.cluster, LANGUAGE)
        found.append(Observed(f"{row.columns.get('source', '')} {row.arch}", "account", scope, known))
    return found


def on_one_h200(path: Path = DATA / "plan_gpu_scores.json") -> list[Observed]:
    """One rank of many worlds: what it reserves, and its own work."""
    return _measured_ranks(path, "one H200")


def blind(path: Path = DATA / "unseen_scores.json") -> list[Observed]:
    """The same for models that no forecast was tuned on: forecast first, measured afterwards."""
    return _measured_ranks(path, BLIND)


def _measured_ranks(path: Path, origin: str) -> list[Observed]:
    """A family of models is a source."""
    found = []
    for row in json.loads(path.read_text())["rows"]:
        scope = scope_of(Strategy.parse(row["strategy"]).axes, H200, row["model"])
        source, errors = f"{origin}, {row['job'].partition(',')[0].partition(':batch')[0]}", row["errors"]
        for grade, names in (("account", {"memory": "accounted", "time": "time"}), ("trace", {"memory": "reserved"})):
            known = {quantity: errors[name] for quantity, name in names.items() if name in errors}
            found.append(Observed(source, grade, scope, known))
    return found


def on_cpu_ranks(path: Path = DATA / "planner_on_links.json") -> list[Observed]:
    """Steps of language models on CPU ranks, on a link of a set rate; their memory was not measured."""
    document = json.loads(path.read_text())
    found = []
    for name, cell in document["cells"].items():
        cluster = Cluster(nodes=document["clusters"][str(cell["gigabits"])]["nodes"], device="cpu")
        for row in (row for row in cell["rows"] if "forecast" in row and "seconds" in row):
            scope = scope_of(Strategy.parse(row["strategy"]).axes, cluster, LANGUAGE)
            found.append(
                Observed(f"CPU ranks, {name}", "account", scope, {"time": row["forecast"] / row["seconds"] - 1})
            )
    return found


def all_runs(outcomes: Iterable[ScoredRun]) -> list[Observed]:
    """Published ones, by these outcomes, and the project's own."""
    return [*published(outcomes), *on_one_h200(), *blind(), *on_cpu_ranks()]


def table_of(observed: Iterable[Observed]) -> dict[str, Any]:
    """Cells with bars, and what was measured at all. A trace's time is the account's."""
    rows = list(observed)
    cells: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for quantity, error in row.errors.items():
            for grade in GRADES if quantity == "time" else (row.grade,):
                cells[_key(grade, row.scope)][quantity].append(abs(error))
    return {
        "devices": sorted({row.scope.device for row in rows}),
        "most_nodes": {model: _most_nodes(row.scope for row in rows if row.scope.model == model) for model in MODELS},
        "cells": [_cell(key, errors) for key, errors in sorted(cells.items()) if _is_known(errors)],
    }


def _key(grade: str, scope: Scope) -> Key:
    return grade, scope.kind, scope.model, scope.axes, scope.scale


def _most_nodes(scopes: Iterable[Scope]) -> dict[str, int]:
    """By axes."""
    most: dict[str, int] = {}
    for scope in scopes:
        most[scope.axes] = max(most.get(scope.axes, 0), scope.nodes)
    return dict(sorted(most.items()))


def _is_known(errors: dict[str, list[float]]) -> bool:
    return any(len(found) >= LEAST for found in errors.values())


def _cell(key: Key, errors: dict[str, list[float]]) -> dict[str, Any]:
    cell: dict[str, Any] = dict(zip(("grade", "on", "model", "axes", "nodes"), key, strict=True))
    for quantity, found in sorted(errors.items()):
        if len(found) >= LEAST:
            cell[quantity] = {"bar": round(_quantile(found, COVERAGE), 3), "runs": len(found)}
    return cell


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


Hits = list[tuple[Observed, str, bool]]
"""For each run and quantity, whether a bar that was made without the run's source covers the error."""


def hits_of(observed: list[Observed]) -> Hits:
    hits: Hits = []
    for source in sorted({row.source for row in observed}):
        table = table_of(row for row in observed if row.source != source)
        for row in (row for row in observed if row.source == source):
            bar = read_bars(table, row.grade, row.scope).bar
            hits += [(row, quantity, abs(error) <= bar[quantity]) for quantity, error in row.errors.items()]
    return hits


def coverage_of(hits: Hits) -> dict[str, Any]:
    """For each grade and quantity, the share of runs that are covered."""
    found: dict[str, dict[str, list[bool]]] = {grade: defaultdict(list) for grade in GRADES}
    for row, quantity, inside in hits:
        found[row.grade][quantity].append(inside)
    return {
        grade: {name: {"runs": len(runs), "covered": round(sum(runs) / len(runs), 3)} for name, runs in of.items()}
        for grade, of in found.items()
    }


def held_out(observed: list[Observed]) -> dict[str, Any]:
    """What bars made without a run's source cover: of all runs, of each class of models, and of the blind rounds."""
    hits = hits_of(observed)
    by_model = {model: coverage_of([hit for hit in hits if hit[0].scope.model == model]) for model in MODELS}
    rounds = coverage_of([hit for hit in hits if hit[0].source.startswith(BLIND)])
    return {"held_out": coverage_of(hits), "held_out_by_model": by_model, "held_out_blind": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="published runs")
    parser.add_argument("--show", action="store_true", help="print the table instead of writing it")
    options = parser.parse_args()
    observed = all_runs(validate_rows(options.rows))
    document = {"coverage": COVERAGE, **held_out(observed), **table_of(observed)}
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
