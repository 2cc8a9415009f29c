"""Fit the host costs of CPU ranks (`ON_CPU` in planner/host_costs.py) to measured steps of planner_on_links.py.

    PYTHONPATH=src python benchmarks/fit_cpu_host.py docs/data/planner_on_links.json    # half a minute

Only the cells named by `--cells` are fitted to, by default those whose link has no limit; all are scored, before and
after. Each constant is scaled in turn until no step of any size helps.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import mean, median
from typing import Any

from planner_on_links import Models, spearman

from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import Strategy
from meshwright.planner import site
from meshwright.planner.host_costs import HostCosts

FITTED = ("operator", "step", "shard", "collective", "neighbour", "copied")
LARGEST, SMALLEST = 1.5, 1.04
"""Factors by which a constant is tried to be larger or smaller."""


class Cells:
    """Measured cells and their forecasts."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document, self._models = document, Models()
        self.names = list(document["cells"])

    def pairs(self, name: str) -> list[tuple[float, float]]:
        """Measured and forecast seconds of each strategy."""
        cell = self._document["cells"][name]
        cluster = Cluster.from_json(self._document["clusters"][str(cell["gigabits"])])
        asked = [Strategy.parse(row["strategy"]) for row in cell["rows"]]
        plans = self._models.planner(cell["model"]).search_named(cluster, asked).plans
        told = {str(plan.strategy): plan.forecast.step for plan in plans}
        return [(row["seconds"], told[row["strategy"]]) for row in cell["rows"]]

    def loss(self, names: list[str]) -> float:
        """How far ratios are from their cell's median, and a part of how far that is from one."""
        total = 0.0
        for name in names:
            ratios = [log(told / measured) for measured, told in self.pairs(name)]
            middle = median(ratios)
            total += mean(abs(ratio - middle) for ratio in ratios) + 0.3 * abs(middle)
        return total / len(names)

    def show(self) -> None:
        for name in self.names:
            measured, told = zip(*self.pairs(name), strict=True)
            ratio = median(each / other for each, other in zip(told, measured, strict=True))
            print(f"{name}: Spearman {spearman(measured, told):.2f}, median ratio {ratio:.2f}")


def fit(cells: Cells, names: list[str], start: HostCosts) -> HostCosts:
    best, factor = start, LARGEST
    least = cells.loss(names)
    while factor > SMALLEST:
        moved = False
        for name in FITTED:
            for times in (factor, 1 / factor):
                site.ON_CPU = replace(best, **{name: getattr(best, name) * times})
                if (found := cells.loss(names)) < least - 1e-4:
                    best, least, moved = site.ON_CPU, found, True
                    break
        factor = factor if moved else factor**0.5
    site.ON_CPU = best
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="what planner_on_links.py measured")
    parser.add_argument("--cells", nargs="+", default=["wide@0", "long@0"], help="those that are fitted to")
    options = parser.parse_args()
    cells = Cells(json.loads(options.json.read_text()))
    cells.show()
    found = fit(cells, options.cells, site.ON_CPU)
    print({name: float(f"{getattr(found, name):.3g}") for name in FITTED})
    cells.show()


if __name__ == "__main__":
    main()
