"""The planner on a real network: every legal strategy measured on two hosts of two ranks, by the rate of their link.

    python benchmarks/planner_on_links.py --json FILE                     # as root, about 20 minutes
    python benchmarks/planner_on_links.py --json FILE --only wide@0.1     # one cell
    python benchmarks/planner_on_links.py --json FILE --forecast          # forecast again, measure nothing

Hosts are namespaces (tests/hosts.py), each with half of this machine's cores; their link is limited with `tc`. At each
rate, `probe` writes a cluster file on them, and the planner forecasts from that file alone. Of each combination of axes
the micro-batch that the planner prefers is measured. Finished cells are kept: run the same command again to go on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import correlation
from typing import Any

import torch
from link_rank import GLOBAL_BATCH, SHAPES, job_of, read_rows

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.candidates import Allowed
from meshwright.planner.search import best_of_each_kind, choose

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the hosts are the tests' own
from hosts import Host, make_hosts, slurm_variables, wait_for

HERE = Path(__file__).parent
GIGABITS = (0.0, 1.0, 0.1)
ALLOWED = Allowed(precisions=("fp32",), recompute=("none",), offload=("",), loss=("whole",))
"""What is searched: all axes and schedules, without policies that change memory or precision."""
NEAR, CORRELATED = 1.10, 0.85
"""What a cell must reach: time of the recommended strategy over the best one's, and Spearman's coefficient."""

MOST_FAILURES = 3
"""Strategies of a cell that may fail before it is given up."""


class Models:
    """The planner of each model; its costs are traced once."""

    def __init__(self) -> None:
        self._planners: dict[str, Planner] = {}

    def planner(self, model: str) -> Planner:
        if model not in self._planners:
            job = job_of(model)
            self._planners[model] = Planner(job, describe(job), GLOBAL_BATCH)
        return self._planners[model]

    def legal(self, model: str, cluster: Cluster) -> list[str]:
        """One strategy of each combination of axes."""
        planner = self.planner(model)
        plans = planner.search(cluster, PlanOptions(allowed=ALLOWED)).plans
        return [str(plan.strategy) for plan in best_of_each_kind(planner.context(cluster), plans)]

    def forecast(self, model: str, cluster: Cluster, strategies: Sequence[str]) -> tuple[dict[str, Plan], str]:
        """The plans by strategy, and the one that is recommended."""
        planner = self.planner(model)
        plans = planner.search_named(cluster, [Strategy.parse(text) for text in strategies]).plans
        first = choose(planner.context(cluster), plans)[0]
        return {str(plan.strategy): plan for plan in plans}, str(first.strategy)


def probe(hosts: list[Host], folder: Path, minutes: float) -> dict[str, Any]:
    """The cluster file that `probe` writes on these hosts."""
    out = folder / "cluster.json"
    _on_ranks(hosts, ["-m", "meshwright", "probe", "--device", "cpu", "--json", "--out", str(out)], minutes)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def measure(model: str, strategies: list[str], hosts: list[Host], folder: Path, minutes: float) -> list[dict[str, Any]]:
    """Time every strategy. One that fails or hangs becomes a row without seconds, and the others go on in new ranks."""
    wanted, done = folder / f"{model}.json", folder / f"{model}.jsonl"
    wanted.write_text(json.dumps(strategies))
    for _ in range(1 + MOST_FAILURES):
        try:
            _on_ranks(hosts, [str(HERE / "link_rank.py"), model, str(wanted), str(done)], minutes)
        except (RuntimeError, TimeoutError) as error:
            stopped = next(text for text in strategies if text not in read_rows(done))
            print(f"{model}: {stopped} failed: {error}", file=sys.stderr, flush=True)
            with done.open("a") as rows:
                rows.write(json.dumps({"strategy": stopped, "seconds": None, "steps": []}) + "\n")
            continue
        return list(read_rows(done).values())
    raise SystemExit(f"{model}: more than {MOST_FAILURES} strategies failed.")


def forecast_cell(cell: dict[str, Any], models: Models, cluster: Cluster) -> dict[str, Any]:
    """The cell with forecasts, the recommended strategy and its scores."""
    timed = [row for row in cell["rows"] if row["seconds"] is not None]
    plans, chosen = models.forecast(cell["model"], cluster, [row["strategy"] for row in timed])
    for row in timed:
        forecast = plans[row["strategy"]].forecast
        row |= {"forecast": forecast.step, "parts": {cause: part for cause, part in forecast.time.items() if part}}
    seconds = {row["strategy"]: row["seconds"] for row in timed}
    best = min(seconds, key=seconds.__getitem__)
    return cell | {
        "best": best,
        "chosen": chosen,
        "slower": seconds[chosen] / seconds[best],
        "spearman": spearman([row["forecast"] for row in timed], [row["seconds"] for row in timed]),
    }


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    return correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def table(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| model | link | strategies | best measured | recommended | slower than the best by | Spearman |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for cell in cells:
        times = {row["strategy"]: f"{row['seconds'] * 1e3:,.0f} ms" for row in cell["rows"] if row["seconds"]}
        words = [
            f"{cell['model']}",
            rate_words(cell["gigabits"]),
            f"{len(times)}",
            f"`{cell['best']}`, {times[cell['best']]}",
            f"`{cell['chosen']}`, {times[cell['chosen']]}",
            f"{cell['slower'] - 1:.0%}",
            f"{cell['spearman']:.2f}",
        ]
        yield f"| {' | '.join(words)} |"


def rate_words(gigabits: float) -> str:
    if not gigabits:
        return "unlimited"
    return f"{gigabits:g} Gbit/s" if gigabits >= 1 else f"{gigabits * 1e3:g} Mbit/s"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what is missing in the document, which is saved after each cell, and forecast all cells."""
    models, document = Models(), _read(options.json)
    cells: dict[str, dict[str, Any]] = document["cells"]
    for gigabits in () if options.forecast else options.gigabits:
        wanted = [model for model in SHAPES if options.only in (None, _key(model, gigabits))]
        missing = [model for model in wanted if _key(model, gigabits) not in cells]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as name, make_hosts(2, gigabits=gigabits, own_cores=True) as hosts:
            folder, rate = Path(name), str(gigabits)
            if rate not in document["clusters"]:
                document["clusters"][rate] = probe(hosts, folder, options.minutes)
            cluster = Cluster.from_json(document["clusters"][rate])
            for model in missing:
                start = time.perf_counter()
                rows = measure(model, models.legal(model, cluster), hosts, folder, options.minutes)
                took = time.perf_counter() - start
                cell = {"model": model, "gigabits": gigabits, "took": took, "rows": rows}
                cells[_key(model, gigabits)] = cell
                _write(options.json, document)
    for key, cell in cells.items():
        cluster = Cluster.from_json(document["clusters"][str(cell["gigabits"])])
        cells[key] = forecast_cell(cell, models, cluster)
    _write(options.json, document)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="what is measured; finished cells in it are kept")
    parser.add_argument("--gigabits", type=float, nargs="+", default=list(GIGABITS), help="per second; 0: no limit")
    parser.add_argument("--only", help="one cell, such as wide@0.1")
    parser.add_argument("--forecast", action="store_true", help="measure nothing: forecast the measured cells again")
    parser.add_argument("--minutes", type=float, default=10.0, help="end the ranks of one cell after this time")
    cells = list(run(parser.parse_args())["cells"].values())
    for line in table(cells):
        print(line)
    near = sum(cell["slower"] <= NEAR for cell in cells)
    correlated = sum(cell["spearman"] >= CORRELATED for cell in cells)
    print(f"\nRecommended within {NEAR - 1:.0%} of the best in {near} of {len(cells)} cells; ", end="")
    print(f"Spearman at least {CORRELATED} in {correlated}.")
    if near < len(cells) - 1 or correlated < len(cells):
        raise SystemExit(1)


def _on_ranks(hosts: list[Host], arguments: list[str], minutes: float) -> None:
    """Run Python with these arguments as four ranks; a `RuntimeError` or `TimeoutError` if a rank fails or is late."""
    command, ranks = [sys.executable, *arguments], []
    for rank in range(4):
        ranks.append(hosts[rank // 2].start(command, env=slurm_variables(rank), stdout=subprocess.DEVNULL))
    try:
        if any(codes := wait_for(ranks, 60 * minutes)):
            raise RuntimeError(f"ranks ended with {codes}")
    except (RuntimeError, TimeoutError):
        for host in hosts:  # with what is left of the ranks
            host.kill()
            host.reboot()
        raise


def _key(model: str, gigabits: float) -> str:
    return f"{model}@{gigabits:g}"


def _read(path: Path) -> dict[str, Any]:
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    return {"machine": machine, "torch": torch.__version__, "global_batch": GLOBAL_BATCH, "clusters": {}, "cells": {}}


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
