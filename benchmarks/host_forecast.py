"""Forecasts of steps that wait for their host, with a constant a launch and with the model's own timed Python.

    python benchmarks/host_forecast.py            # needs no GPU; holds forecasts against docs/data/host_gaps.json

The host of the measured H200 is known by one number, the reference pass. It is found from the first model (a GPT of 10
million parameters), and the others are forecast with it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host_gaps import workloads

from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.host_passes import HostPasses
from meshwright.facts.strategy import Strategy
from meshwright.planner.host_costs import HOST_REFERENCE
from meshwright.planner.search import PlanContext, consider
from meshwright.planner.stage_costs import StageCosts
from meshwright.tracing.costs import measure_costs
from meshwright.tracing.host_passes import time_host_passes

DATA = Path(__file__).parents[1] / "docs" / "data" / "host_gaps.json"
STRATEGY = Strategy.parse("single,bf16")
CLUSTER = Cluster.parse("1xH200")


@dataclass(frozen=True)
class Case:
    """One model with its costs, the passes of its host here, and its measured step."""

    name: str
    planner: Planner
    costs: Any
    passes: HostPasses
    measured: float

    def forecast(self, reference: float | None) -> dict[str, float]:
        """Seconds of the step by cause; with no reference, by a constant a launch."""
        host = None if reference is None else self.passes.at(reference)
        hardware = hardware_of(CLUSTER)
        context = PlanContext(
            facts=self.planner.facts,
            stage_costs=StageCosts(
                self.planner.facts, {("bf16", "none"): self.costs}, hardware, host=lambda precision: host
            ),
            cluster=CLUSTER,
            hardware=hardware,
            global_batch=self.planner.global_batch,
        )
        return dict(consider(context, STRATEGY).forecast.time)

    def step(self, reference: float | None) -> float:
        return sum(self.forecast(reference).values())


def read_cases() -> list[Case]:
    rows = json.loads(DATA.read_text())["rows"]
    measured = {row["model"]: row["ms"] / 1e3 for row in rows if row["strategy"] == str(STRATEGY)}
    found = []
    for work in workloads(tiny=False):
        facts = describe(work.job)
        planner = Planner(work.job, facts, work.job.global_batch)
        passes = time_host_passes(work.job, facts, STRATEGY.precision)
        costs = measure_costs(work.job, facts, "bf16")
        found.append(Case(work.name, planner, costs, passes, measured[work.name]))
    return found


def fit_reference(case: Case) -> float:
    """The reference pass with which a case's forecast is its measured step: found by halving."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if case.step(middle) < case.measured else (low, middle)
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    cases = read_cases()
    reference = fit_reference(cases[0])
    here = cases[0].passes.reference
    print(f"reference pass: {here * 1e3:.2f} ms here; {reference * 1e3:.2f} ms fits {cases[0].name}", end="")
    print(f"; the planner has {HOST_REFERENCE * 1e3:.2f} ms")
    for case in cases:
        own = sum(map(sum, case.passes.units.values()))
        words = [f"{case.name:10} measured {case.measured * 1e3:6.1f} ms; own Python here {own * 1e3:5.1f} ms"]
        ways = {"constant": None, "fitted": reference, "planner's": HOST_REFERENCE}
        for way, value in ways.items():
            step = case.step(value)
            words.append(f"{way} {step * 1e3:6.1f} ms ({step / case.measured - 1:+.0%})")
        print("; ".join(words), flush=True)


if __name__ == "__main__":
    main()
