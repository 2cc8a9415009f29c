"""Hold traced memory against what was measured on a GPU: every row of gpu_check.json and gpu_axes.json.

    PYTHONPATH=src python benchmarks/trace_check.py                     # needs no GPU; some minutes
    PYTHONPATH=src python benchmarks/trace_check.py --only "large-gpt fsdp"

The rows of gpu_check.json were measured one after another in one process, and the workspaces that cuBLAS got on the
threads of `dp` were still there after it: they are added to what is traced. The peak of its compiled row is that of the
first step too, in which Inductor compiles and tries kernels, so it does not count. Exit 1 if a row is traced more than
3 % too low.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import gpu_axes
import gpu_check

import meshwright as mw
from meshwright.describe.model import describe
from meshwright.errors import MeshwrightError
from meshwright.tracing import trace_step
from meshwright.tracing.memory import CUBLAS

DATA = Path(__file__).parents[1] / "docs" / "data"
GIB = 1 << 30
TOO_LOW = -0.03


@dataclass(frozen=True)
class Case:
    """One measured row and what it was of."""

    name: str
    job: mw.Job
    strategy: str
    ranks: int
    rank: int
    left_over: int
    """Bytes of earlier cases in the same process."""
    peak: float
    reserved: float | None
    """Measured, in GiB."""


@dataclass(frozen=True)
class Row:
    """Traced against measured, in GiB."""

    case: str
    traced: float
    measured: float
    traced_reserved: float
    measured_reserved: float | None
    left_over: float
    seconds: float
    """Of this process's CPU."""
    memory: dict[str, int]
    counts: bool = True
    """Whether it is among those that the mean is of: nothing went unseen, and most of it is the step's own."""

    @property
    def error(self) -> float:
        return self.traced / self.measured - 1

    @property
    def reserved_error(self) -> float | None:
        return self.traced_reserved / self.measured_reserved - 1 if self.measured_reserved else None


def cases() -> Iterator[Case]:
    left = 0
    for row in json.loads((DATA / "gpu_check.json").read_text())["rows"]:
        model, strategy, *rest = row["case"].split(" ")
        if row["case"] == "gpt dp on one GPU twice":
            left += 2 * CUBLAS
        if row["peak_gib"] is None:
            continue
        job = (
            gpu_check.large_job(gpu_check.LARGE, fused=True) if model == "large-gpt" else gpu_check.load_example(model)
        )
        ranks = int(rest[-1]) if rest else 1
        yield Case(row["case"], job, strategy, ranks, 0, left, row["peak_gib"], row["reserved_gib"])
    for row in json.loads((DATA / "gpu_axes.json").read_text())["rows"]:
        if "peak_gib" in row:
            strategy, _, rank, _, ranks = row["case"].split(" ")
            job = axes_job()
            yield Case(row["case"], job, strategy, int(ranks), int(rank), 0, row["peak_gib"], None)


@cache
def axes_job() -> mw.Job:
    return gpu_axes.job_of(gpu_axes.LARGE)


@cache
def facts_of(job: mw.Job) -> Any:
    return describe(job)


def run(case: Case, *, whole: bool) -> Row:
    start = time.process_time()
    facts, strategy = facts_of(case.job), mw.Strategy.parse(case.strategy)
    trace = trace_step(case.job, facts, strategy, ranks=case.ranks, rank=case.rank, whole=whole)
    return Row(
        case=case.name,
        traced=(trace.peak + case.left_over) / GIB,
        measured=case.peak,
        traced_reserved=(trace.reserved + case.left_over) / GIB,
        measured_reserved=case.reserved,
        left_over=case.left_over / GIB,
        seconds=time.process_time() - start,
        memory=dict(trace.memory),
        counts=not trace.unseen and case.left_over < case.peak * GIB / 2 and not strategy.compile,
    )


def show(row: Row) -> str:
    reserved = "" if row.reserved_error is None else f"{row.measured_reserved:.3f} | {row.reserved_error:+.1%}"
    return (
        f"| {row.case} | {row.traced:.3f} | {row.measured:.3f} | {row.error:+.2%} | "
        f"{row.traced_reserved:.3f} | {reserved or ' | '} | {'' if row.counts else '*'} |"
    )


def summary(rows: list[Row]) -> str:
    counted = [row for row in rows if row.counts]
    errors = [row.error for row in counted]
    reserved = [row.reserved_error for row in counted if row.reserved_error is not None]
    text = f"peak: {len(errors)} rows, mean {mean(map(abs, errors)):.2%}, {min(errors):+.2%} to {max(errors):+.2%}"
    if reserved:
        text += f"; reserved: {len(reserved)} rows, mean {mean(map(abs, reserved)):.1%}, "
        text += f"{min(reserved):+.1%} to {max(reserved):+.1%}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name holds one of these")
    parser.add_argument("--whole", action="store_true", help="trace all blocks instead of a few")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    print("| case | traced GiB | measured | error | reserved, traced | measured | error | |\n" + "| --- " * 8 + "|")
    rows = []
    for case in (case for case in cases() if any(text in case.name for text in options.only)):
        try:
            rows.append(run(case, whole=options.whole))
        except MeshwrightError as error:
            print(f"| {case.name} | {error} |", flush=True)
            continue
        print(show(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(summary(rows))
    return 1 if any(row.counts and row.error < TOO_LOW for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
