"""`rehearse --tune` against an exhaustive search: real rehearsals of everything that the tuner may choose.

    PYTHONPATH=src python benchmarks/exhaust_gpu.py --json docs/data/rehearse_exhaust.json              # on a GPU
    PYTHONPATH=src python benchmarks/exhaust_gpu.py --json docs/data/rehearse_exhaust_cpu.json --small  # on a CPU
    PYTHONPATH=src python benchmarks/exhaust_gpu.py --json docs/data/rehearse_exhaust.json --table

Every data strategy with every micro-batch and recompute is rehearsed under a limit of memory that leaves no room for
the fastest. The tuner chooses by the same rehearsals, with a tenth of them. The fastest of many is a lucky one, so both
winners are rehearsed again afterwards, in turns. All rehearsals run in one process, which saves seconds each; it is
started anew when one leaves memory behind. Results are written after each rehearsal;
searches that a file holds are not made again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rehearse_gpu import say, untraced

from meshwright.api.rehearser import Rehearser
from meshwright.api.tune import Attempts, Tunable, TuneOptions, tunable, tune
from meshwright.errors import BadInput, one_line
from meshwright.facts.rehearsal import FAILED, REFUSED, Rehearsal
from meshwright.facts.strategy import Strategy
from meshwright.planner.candidates import Allowed
from meshwright.planner.tune import Trial
from meshwright.rehearse.process import preloaded
from meshwright.rehearse.task import RehearsalTask
from meshwright.units import GIB

LEFT_BEHIND = 64 << 20
"""Bytes on the device after a rehearsal from which its process is not used again."""
ROUNDS, STEPS = 3, 5
"""Of the winners' rehearsals in turns."""
NEAR = 0.95
"""Share of the limit from which a strategy counts as near it."""


@dataclass(frozen=True)
class Search:
    job: str
    world: int
    batch: int
    """Global."""
    limit: int
    recompute: tuple[str, ...] = ("none", "full")
    precision: str = "bf16"

    @property
    def options(self) -> TuneOptions:
        allowed = Allowed(
            precisions=(self.precision,),
            recompute=self.recompute,
            offload=("",),
            loss=("whole",),
            tensor=False,
            pipeline=False,
        )
        return TuneOptions(allowed=allowed)


LLAMA = "preset:llama3-8b:seq=4096"
SEARCHES = (
    Search("hf-qwen", 8, 64, 32 * GIB),
    Search("preset:vit-large", 8, 256, 8 * GIB),
    Search("preset:gpt2-xl", 8, 128, 38 * GIB),
    Search(LLAMA, 8, 16, 74 * GIB, recompute=("none", "selective", "full")),
    Search(LLAMA, 64, 128, 74 * GIB),
)
SMALL = (Search("examples/gpt.py", 2, 16, 40 << 20, precision="fp32"),)


@dataclass
class OneProcess:
    """Rehearses in one process after another task has ended there; a `Rehearser.run`."""

    process: Any = None
    pipe: Any = None

    def __call__(self, task: RehearsalTask, *, timeout: float, tell: Any = None) -> Rehearsal:
        if self.process is None:
            self._start(task)
        started = time.perf_counter()
        self.pipe.send(task)
        if not self.pipe.poll(timeout):
            self.end()
            return Rehearsal(status=FAILED, reason=f"It had not ended after {timeout:g} s.")
        try:
            found, left = self.pipe.recv()
        except EOFError:
            self.end()
            return Rehearsal(status=FAILED, reason="Its process ended without a result.")
        if left > LEFT_BEHIND:
            say(f"{left / GIB:.2f} GiB were left behind")
            self.end()
        return replace(Rehearsal.from_json(found), took=time.perf_counter() - started)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def _start(self, task: RehearsalTask) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(preloaded(task.job))
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()
        there.close()


def _serve(pipe: Any) -> None:
    os.dup2(2, 1)  # what a job prints must not be mixed with results
    while True:
        pipe.send((_rehearse(pipe.recv()).to_json(), _clean()))


def _rehearse(task: RehearsalTask) -> Rehearsal:
    from meshwright.rehearse.rank import rehearse

    try:
        return rehearse(task, lambda words: None)
    except BadInput as error:
        return Rehearsal(status=REFUSED, reason=str(error))
    except Exception as error:
        return Rehearsal(status=FAILED, reason=one_line(error))


def _clean() -> int:
    """Give back what a rehearsal held; the bytes that it still holds."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@dataclass
class Results:
    """The file of results: one row for each search, with what has been rehearsed so far."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.rows = json.loads(self.path.read_text())["rows"]

    def has(self, search: Search) -> bool:
        return any("again_ms" in row and _is_of(row, search) for row in self.rows)

    def begin(self, search: Search) -> dict[str, Any]:
        self.rows = [row for row in self.rows if not _is_of(row, search)]
        self.rows.append(
            {
                "job": search.job,
                "world": search.world,
                "global_batch": search.batch,
                "limit_gib": search.limit / GIB,
                "trials": [],
            }
        )
        return self.rows[-1]

    def write(self) -> None:
        self.path.write_text(json.dumps({"torch": torch.__version__, "rows": self.rows}, indent=1) + "\n")


def _is_of(row: dict[str, Any], search: Search) -> bool:
    return (row["job"], row["world"], row["global_batch"]) == (search.job, search.world, search.batch)


def run(search: Search, results: Results, until: float) -> None:
    """Rehearse everything, tune by the same rehearsals, and rehearse both winners again."""
    row = results.begin(search)
    with _rehearser(search) as rehearser:
        found = tunable(rehearser, search.options)
        row["candidates"] = len(found)
        attempt = Attempts(rehearser, {one.candidate.strategy: one.rank for one in found})
        for one in found:
            if time.monotonic() > until:
                return
            row["trials"].append(_show(attempt(one.candidate)))
            results.write()
        row["tuned"] = _tuned(rehearser, search, found)
        best = fastest(row["trials"])
        row["exhausted"] = {name: best[name] for name in ("strategy", "step_ms", "held_gib")}
        row["again_ms"] = in_turns(rehearser, [row["tuned"]["strategy"], best["strategy"]], until)
        results.write()


@contextmanager
def _rehearser(search: Search) -> Iterator[Rehearser]:
    process = OneProcess()
    with untraced(search.job, search.world, search.batch) as rehearser:
        rehearser.site = replace(rehearser.site, limit=search.limit)
        rehearser.run = process
        try:
            yield rehearser
        finally:
            process.end()


def _show(trial: Trial) -> dict[str, Any]:
    return {
        "strategy": str(trial.candidate.strategy),
        "fits": trial.fits,
        "step_ms": None if trial.seconds is None else round(trial.seconds * 1e3, 2),
        "held_gib": None if trial.bytes is None else round(trial.bytes / GIB, 3),
        "why": trial.why,
    }


def _tuned(rehearser: Rehearser, search: Search, found: list[Tunable]) -> dict[str, Any]:
    """What the tuner chooses with a tenth of the trials. It remembers those that were made."""
    tuned = tune(rehearser, replace(search.options, trials=max(1, len(found) // 10)))
    return {name: tuned[name] for name in ("strategy", "step_ms", "peak_gib", "trials", "why")}


def fastest(trials: list[dict[str, Any]]) -> dict[str, Any]:
    return min((trial for trial in trials if trial["fits"]), key=lambda trial: trial["step_ms"] or inf)


def in_turns(rehearser: Rehearser, strategies: list[str], until: float) -> dict[str, list[float]]:
    """The steps of several strategies in milliseconds, rehearsed again."""
    found: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    for _ in range(ROUNDS if len(found) > 1 else 0):
        if time.monotonic() > until:
            break
        for strategy, times in found.items():
            afresh = replace(rehearser, steps=STEPS, done={})
            times.append(round((afresh.rehearse(Strategy.parse(strategy)).step or inf) * 1e3, 2))
    return found


def table(rows: list[dict[str, Any]]) -> None:
    """One line for each search. `near`: the fastest with at least 95 % of the limit, and how much slower it is."""
    print("| job, ranks, batch | limit GiB | trials | fit | fastest | ms | tuned | trials | ms | GiB | near | slower |")
    print("|" + " --- |" * 12)
    for row in rows:
        name = f"{row['job']}, {row['world']}, {row['global_batch']}"
        if "tuned" not in row:
            print(f"| {name} | {len(row['trials'])} of {row.get('candidates')} |")
            continue
        tuned, best, again = row["tuned"], row["exhausted"], row["again_ms"]
        near = [one for one in row["trials"] if one["fits"] and one["held_gib"] >= NEAR * row["limit_gib"]]
        full = fastest(near) if near else {"strategy": "none", "step_ms": inf}
        times = [median(again[one["strategy"]] or [one["step_ms"]]) for one in (best, tuned)]
        fit = sum(one["fits"] for one in row["trials"])
        print(
            f"| {name} | {row['limit_gib']:g} | {len(row['trials'])} | {fit} | `{best['strategy']}` | {times[0]:.0f} "
            f"| `{tuned['strategy']}` | {len(tuned['trials'])} | {times[1]:.0f} | {tuned['peak_gib']:.1f} "
            f"| `{full['strategy']}` | {full['step_ms'] / best['step_ms'] - 1:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", help="searches whose job and ranks hold this text")
    parser.add_argument("--seconds", type=float, default=inf, help="no rehearsal begins after this time")
    parser.add_argument("--small", action="store_true", help="a small model on the CPU")
    parser.add_argument("--table", action="store_true", help="print what the file holds")
    options = parser.parse_args()
    get_context("forkserver").set_forkserver_preload(preloaded("hf:"))  # before the first process starts its server
    results, until = Results(options.json), time.monotonic() + options.seconds
    if not options.table:
        for search in SMALL if options.small else SEARCHES:
            if options.only in f"{search.job} {search.world}" and not results.has(search):
                run(search, results, until)
    table(results.rows)


if __name__ == "__main__":
    main()
