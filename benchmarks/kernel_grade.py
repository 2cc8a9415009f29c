"""Forecasts by measured kernels against measured steps, on one device: `single`, a model of each kind.

    python benchmarks/kernel_grade.py --json docs/data/kernel_grade.json     # on a CPU: one thread; on a GPU: bf16
    python benchmarks/kernel_grade.py --only GPT ViT --rounds 1

For each model: operators of a traced step are timed one by one, a plan takes its kernels from there, and the same step
is run by the engine. Nothing is fitted to steps. Steps and kernels are measured alternately, and a CPU's by the time
that the process has used, so that other processes of the machine disturb both alike.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from kernel_models import HELD_OUT, JOBS

from meshwright.api.job_planner import Planner
from meshwright.api.probe_kernels import describe_device, measured_table
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.kernel_table import KernelTable
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.search import consider
from meshwright.probe.kernel_clock import CpuClock, clock_of
from meshwright.probe.machine import local_cluster
from meshwright.runtime.profile_step import synchronize

ALL = {**JOBS, **HELD_OUT}
SECONDS = 1.5
"""Of steps, before and after each time that the kernels are measured."""


TURNS = 3
"""How often the kernels are measured; the forecast in the middle counts."""


@dataclass(frozen=True)
class Place:
    """Where this runs: a device, and the strategy whose precision it is good at."""

    device: torch.device
    strategy: str

    @property
    def cluster(self) -> Cluster:
        return local_cluster(self.device.type, devices=1)

    def clock(self) -> float:
        return time.process_time() if self.device.type == "cpu" else time.perf_counter()


class Steps:
    """Steps of one job under the engine, timed on request."""

    def __init__(self, job: Job, facts: ModelFacts, place: Place) -> None:
        self._place, world = place, World(device=place.device)
        self._trainer = Trainer(job, facts, Strategy.parse(place.strategy).resolve(1), world, seed=0)
        batch = job.sample(job.global_batch) if job.sample else {}
        self._batch = {name: tensor.to(place.device) for name, tensor in batch.items()}
        for _ in range(3):
            self._trainer.step(self._batch)

    def times(self) -> list[float]:
        found: list[float] = []
        while sum(found) < SECONDS or len(found) < 5:
            synchronize(self._place.device)
            start = self._place.clock()
            self._trainer.step(self._batch)
            synchronize(self._place.device)
            found.append(self._place.clock() - start)
        return found


def forecast(job: Job, facts: ModelFacts, place: Place, tables: tuple[KernelTable, ...]) -> Plan:
    planner = Planner(job, facts, job.global_batch, kernels=tables)
    strategy = Strategy.parse(place.strategy)
    planner.measure(strategy.precision, strategy.recompute)
    return consider(planner.context(place.cluster), strategy)


def grade(name: str, job: Job, place: Place) -> dict[str, Any]:
    facts = describe(job)
    planner = Planner(job, facts, job.global_batch)
    clock = CpuClock(place.clock) if place.device.type == "cpu" else clock_of(place.device)
    steps = Steps(job, facts, place)
    times, forecasts = steps.times(), []
    for _ in range(TURNS):
        table = describe_device(place.device, place.clock)
        table, _, found = measured_table(planner, [Strategy.parse(place.strategy)], place.device, table, clock=clock)
        forecasts.append(forecast(job, facts, place, (table,)))
        times += steps.times()
    measured, usual = median(times), forecast(job, facts, place, ())
    plan = sorted(forecasts, key=lambda one: one.forecast.step)[TURNS // 2]
    row = {
        "model": name,
        "strategy": place.strategy,
        "measured_ms": measured * 1e3,
        "forecast_ms": plan.forecast.step * 1e3,
        "ratio": plan.forecast.step / measured,
        "catalogue_ratio": usual.forecast.step / measured,
        "time": {cause: seconds * 1e3 for cause, seconds in plan.forecast.time.items()},
        "kernels": dict(plan.kernels),
        "operators": len(found.kernels),
        "not_measured": sorted(found.failed),
    }
    print(
        f"{name:10} measured {row['measured_ms']:8.2f} ms, forecast {row['forecast_ms']:8.2f} ms, "
        f"ratio {row['ratio']:.3f} (catalogue {row['catalogue_ratio']:.2f}); {row['operators']} operators; "
        + ", ".join(f"{cause} {ms:.2f}" for cause, ms in row["time"].items())
        + "; "
        + ", ".join(f"{source} {share:.0%}" for source, share in row["kernels"].items()),
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(JOBS))
    parser.add_argument("--held-out", action="store_true", help="the models that nothing was chosen by")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--strategy", help="default: single in fp32 on a CPU, single,bf16 on a GPU")
    parser.add_argument("--times", type=int, default=1, help="factor on every job's batch")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    place = Place(torch.device(given.device), given.strategy or ("single" if given.device == "cpu" else "single,bf16"))
    rows = [
        grade(name, replace(ALL[name], global_batch=ALL[name].global_batch * given.times), place)
        for _ in range(given.rounds)
        for name in (HELD_OUT if given.held_out else given.only)
    ]
    errors = [abs(row["ratio"] - 1) for row in rows]
    usual = [abs(row["catalogue_ratio"] - 1) for row in rows]
    print(f"mean error {mean(errors):.1%}, worst {max(errors):.1%}; by the catalogue {mean(usual):.0%}")
    if given.json:
        document = {"torch": torch.__version__, "device": given.device, "mean_error": mean(errors), "rows": rows}
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
