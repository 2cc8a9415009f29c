"""Models against strategies: run every pair against plain PyTorch, write down what was found, and draw the table.

Used by zoo_check.py, registry_models.py and architectures.py. A run goes on where an earlier one ended.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the judge and the ranks are the tests' own

from rank_pool import RankPool
from zoo.judge import Course
from zoo.programs import Case, Outcome, examine, plain_of

GOOD = ("equal", "refused")


@dataclass(frozen=True)
class Row:
    model: str
    strategy: str
    verdict: str
    reason: str = ""
    held: float | None = None
    """The largest share of the trainable parameters that a rank updates."""


def mark(row: Row) -> str:
    return {"equal": "=", "refused": "r"}.get(row.verdict, row.verdict)


def share(row: Row) -> str:
    return row.verdict if row.held is None else f"{row.held:.2f}"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Which models and strategies there are, and how a model is found."""

    models: Sequence[str]
    strategies: Sequence[str]
    case: Callable[[str], Case]
    ranks: Callable[[str], int] = lambda strategy: 2
    packages: Sequence[str] = ("torch",)
    cell: Callable[[Row], str] = mark
    """What the table shows of a pair."""
    marker: str = "table"
    """The table's name in the page."""

    def read(self, path: Path | None, *, again: bool) -> dict[tuple[str, str], Row]:
        """What an earlier run has found; without what was bad, if that is to be run again."""
        if path is None or not path.exists():
            return {}
        rows = [Row(**row) for row in json.loads(path.read_text())["results"] if "model" in row]
        kept = [row for row in rows if row.model in self.models and (row.verdict in GOOD or not again)]
        return {(row.model, row.strategy): row for row in kept}

    def write(self, path: Path, rows: dict[tuple[str, str], Row]) -> None:
        versions = {name: importlib.metadata.version(name) for name in ("meshwright", *self.packages)}
        ordered = [rows[key] for key in self.pairs(rows)]
        path.write_text(
            json.dumps({"versions": versions, "results": [asdict(row) for row in ordered]}, indent=1) + "\n"
        )

    def pairs(self, rows: dict[tuple[str, str], Row]) -> list[tuple[str, str]]:
        return [(model, s) for model in self.models for s in self.strategies if (model, s) in rows]

    def table(self, rows: dict[tuple[str, str], Row]) -> str:
        """A row for each model that was run."""
        lines = ["| model | " + " | ".join(f"`{s}`" for s in self.strategies) + " |"]
        lines.append("| --- " * (len(self.strategies) + 1) + "|")
        for model in self.models:
            marks = [self.cell(rows[model, s]) if (model, s) in rows else "" for s in self.strategies]
            if any(marks):
                lines.append(f"| {model} | " + " | ".join(marks) + " |")
        return "\n".join(lines)

    def main(self, description: str) -> None:
        asked = self._parse(description)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        rows = self.read(asked.json, again=asked.again)
        self._run(asked, rows)
        table = self.table(rows)
        print(table)
        if asked.page:
            place = re.compile(rf"(?<=<!-- {self.marker} -->\n).*(?=<!-- end of {self.marker} -->)", re.DOTALL)
            asked.page.write_text(place.sub(lambda _: f"{table}\n", asked.page.read_text()))
        counts = Counter(row.verdict for row in rows.values())
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
        sys.exit(0 if counts.keys() <= set(GOOD) else 1)

    def _parse(self, description: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--models", nargs="*", default=list(self.models), choices=self.models, metavar="M")
        parser.add_argument("--strategies", nargs="+", default=self.strategies, choices=self.strategies, metavar="S")
        parser.add_argument("--json", type=Path, help="what was found, and what an earlier run found")
        parser.add_argument("--again", action="store_true", help="run bad pairs of the file again")
        parser.add_argument("--page", type=Path, help="a page of the docs whose table is drawn anew")
        return parser.parse_args()

    def _run(self, asked: argparse.Namespace, rows: dict[tuple[str, str], Row]) -> None:
        pools: dict[int, RankPool] = {}
        for number, model in enumerate(asked.models, 1):
            missing = [strategy for strategy in asked.strategies if (model, strategy) not in rows]
            case = self.case(model) if missing else None
            for strategy in missing:
                start, ranks = time.perf_counter(), self.ranks(strategy)
                pool = None if strategy == "single" else pools.setdefault(ranks, RankPool(ranks))
                found = examine(case, strategy, pool)
                rows[model, strategy] = Row(model, strategy, found.verdict, found.reason, found.held)
                seconds = time.perf_counter() - start
                print(
                    f"[{number}/{len(asked.models)}] {model:26} {strategy:16} {seconds:4.1f} s  {short(found)}",
                    flush=True,
                )
                if asked.json:  # after each, so that a run which is ended early leaves what it found
                    self.write(asked.json, rows)
        for pool in pools.values():
            pool.close()


def widest_case(module: str, name: str) -> Case:
    """In float64 if the model trains so; packages compute some things in float32 whatever the model's dtype."""
    for double in (True, False):
        case = Case(module, name, double=double, exact=False)
        try:
            course = plain_of(case)
        except Exception as error:
            print(f"{name}: not in {'float64' if double else 'float32'}: {error}", file=sys.stderr)
        else:
            if is_sound(course):
                return case
    raise RuntimeError(f"{name} does not train in plain PyTorch.")


def is_sound(course: Course) -> bool:
    """Whether all numbers are finite, and no forward pass has cast a parameter to what it wants."""
    finite = all(numpy.isfinite(gradient).all() for gradient in course.gradients.values())
    return finite and all(value.dtype == course.start[name].dtype for name, value in course.end.items())


def short(found: Outcome) -> str:
    return str(found).splitlines()[0][:300]
