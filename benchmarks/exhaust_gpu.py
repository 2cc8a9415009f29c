"""`rehearse --tune` against an exhaustive search: real rehearsals of everything that the tuner may choose.

    PYTHONPATH=src python benchmarks/exhaust_gpu.py --json docs/data/rehearse_exhaust.json              # on a GPU
    PYTHONPATH=src python benchmarks/exhaust_gpu.py --json docs/data/rehearse_exhaust_cpu.json --small  # on a CPU
    PYTHONPATH=src python benchmarks/exhaust_gpu.py --json docs/data/rehearse_exhaust.json --choose  # or --table

Every data strategy with every micro-batch and recompute is rehearsed under a limit of memory that leaves no room for
the fastest. The tuner chooses by the same rehearsals, with a tenth of them. The fastest of many is a lucky one, so both
winners are rehearsed again afterwards, in turns. All rehearsals run in one process, which saves seconds each; it is
started anew when one leaves memory behind. Results are written after each rehearsal, and the same command goes on with
those that are missing. `--choose` needs no GPU: it prints what today's tuner chooses by the rehearsals that are there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
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
from meshwright.api.tune import Attempts, Tunable, TuneOptions, tunable
from meshwright.errors import BadInput, one_line
from meshwright.facts.rehearsal import FAILED, REFUSED, Rehearsal
from meshwright.facts.strategy import Strategy
from meshwright.planner.candidates import Allowed
from meshwright.planner.tune import Candidate, Trial, Tuner
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
    least: int = 1
    """Smallest micro-batch: smaller ones keep the host busy, not the device."""
    steps: int = 2
    """That are timed."""

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
    Search("hf-qwen-3b", 8, 32, 38 * GIB, steps=1),
    Search("hf-qwen-wide", 8, 64, 62 * GIB, least=2, steps=1),
    Search(LLAMA, 8, 16, 74 * GIB, recompute=("none", "selective", "full"), steps=1),
    Search(LLAMA, 64, 128, 74 * GIB, steps=1),
    Search("preset:gpt2-xl", 8, 128, 38 * GIB, least=4),
    Search("preset:vit-large", 8, 1024, 15 * GIB, least=32),
    Search("preset:vit-large", 8, 1024, 21 * GIB, least=32),
)
"""With about the memory of cards with 32, 40, 64, 80, 40, 16 and 24 GB, which leaves no room for the fastest."""
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

    def row(self, search: Search) -> dict[str, Any]:
        """The search's own row. What fits under a smaller limit is taken over from there: it would be the same here."""
        key = {"job": search.job, "world": search.world, "global_batch": search.batch}
        limit = search.limit / GIB
        alike = [row for row in self.rows if row.items() >= key.items()]
        known = next((row for row in alike if row["limit_gib"] == limit), None)
        if known is None:
            trials = [one for row in alike if row["limit_gib"] < limit for one in row["trials"] if one["fits"]]
            known = {**key, "limit_gib": limit, "trials": trials, "again_ms": {}}
            self.rows.append(known)
        return known

    def write(self) -> None:
        self.path.write_text(json.dumps({"torch": torch.__version__, "rows": self.rows}, indent=1) + "\n")


def run(search: Search, results: Results, until: float) -> None:
    """Rehearse what the row lacks, tune by the same rehearsals, and rehearse both winners again."""
    row = results.row(search)
    with _rehearser(search) as rehearser:
        found = [one for one in tunable(rehearser, search.options) if one.candidate.size >= search.least]
        row["candidates"] = len(found)
        attempt = Recalled(Attempts(rehearser, {one.candidate.strategy: one.rank for one in found}), row["trials"])
        for one in found:
            if time.monotonic() < until:
                attempt(one.candidate)
                results.write()
        row["tuned"] = _tuned(attempt, search, found)
        row["exhausted"] = fastest(row["trials"])
        winners = [row["tuned"]["strategy"], row["exhausted"]["strategy"]]
        if not row["again_ms"] and time.monotonic() < until:
            row["again_ms"] = in_turns(rehearser, winners)
        results.write()


def choose(search: Search, results: Results) -> None:
    """Print what the tuner chooses by the stored rehearsals, and the fastest of them."""
    trials = results.row(search)["trials"]
    with _rehearser(search) as rehearser:
        found = [one for one in tunable(rehearser, search.options) if one.candidate.size >= search.least]
    among = {str(one.candidate.strategy) for one in found}
    known = [trial for trial in trials if trial["strategy"] in among]
    tuned, best = _tuned(Recalled(_missing, known), search, found), fastest(known)
    print(f"{search.job}, {search.world} ranks, {search.limit / GIB:g} GiB: {len(known)} of {len(found)} rehearsed")
    print(f"  fastest: {best['strategy']} {best['step_ms']:.0f} ms")
    print(f"  chosen with {len(tuned['trials'])}: {tuned['strategy']} {tuned['step_ms']:.0f} ms", flush=True)


def _missing(candidate: Candidate) -> Trial:
    raise SystemExit(f"{candidate.strategy} was not rehearsed")


class Recalled:
    """Makes the trials that are not known yet, and adds them to the others."""

    def __init__(self, attempt: Callable[[Candidate], Trial], trials: list[dict[str, Any]]) -> None:
        self._attempt, self._trials = attempt, trials

    def __call__(self, candidate: Candidate) -> Trial:
        known = next((one for one in self._trials if one["strategy"] == str(candidate.strategy)), None)
        if known is None:
            trial = self._attempt(candidate)
            self._trials.append(_show(trial))
            return trial
        seconds = None if known["step_ms"] is None else known["step_ms"] / 1e3
        held = None if known["held_gib"] is None else known["held_gib"] * GIB
        return Trial(candidate=candidate, fits=known["fits"], seconds=seconds, bytes=held, why=known["why"])


@contextmanager
def _rehearser(search: Search) -> Iterator[Rehearser]:
    process = OneProcess()
    with untraced(search.job, search.world, search.batch) as rehearser:
        rehearser.site = replace(rehearser.site, limit=search.limit)
        rehearser.run, rehearser.steps = process, search.steps
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


def _tuned(attempt: Recalled, search: Search, found: list[Tunable]) -> dict[str, Any]:
    """What the tuner chooses with a tenth of the trials."""
    candidates = [one.candidate for one in found]
    tuner = Tuner(candidates=candidates, limit=search.limit, attempt=attempt, most=max(1, len(found) // 10))
    best = tuner.search()
    if best is None:
        raise SystemExit(f"{search.job}: none of {len(tuner.trials)} trials fits")
    return {**_show(best), "trials": [_show(trial) for trial in tuner.trials]}


def fastest(trials: list[dict[str, Any]]) -> dict[str, Any]:
    return min((trial for trial in trials if trial["fits"]), key=lambda trial: trial["step_ms"] or inf)


def in_turns(rehearser: Rehearser, strategies: list[str]) -> dict[str, list[float]]:
    """The steps of two strategies in milliseconds, rehearsed again; nothing if they are the same."""
    found: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    for _ in range(ROUNDS if len(found) > 1 else 0):
        for strategy, times in found.items():
            afresh = replace(rehearser, steps=STEPS, done={})
            times.append(round((afresh.rehearse(Strategy.parse(strategy)).step or inf) * 1e3, 2))
    return found


def table(rows: list[dict[str, Any]]) -> None:
    """One line for each search. `near`: the fastest with at least 95 % of the limit, and how much slower it is."""
    print("| job, ranks, batch | limit GiB | trials | fit | fastest | ms | tuned | trials | ms | GiB | near | slower |")
    print("|" + " --- |" * 12)
    for row in rows:
        tuned, best, trials = row["tuned"], row["exhausted"], row["trials"]
        near = [one for one in trials if one["fits"] and one["held_gib"] >= NEAR * row["limit_gib"]]
        full = fastest(near) if near else {"strategy": "none", "step_ms": inf}
        times = [median(row["again_ms"].get(one["strategy"]) or [one["step_ms"]]) for one in (best, tuned)]
        print(
            f"| {row['job']}, {row['world']}, {row['global_batch']} | {row['limit_gib']:g} "
            f"| {len(trials)} of {row['candidates']} | {sum(one['fits'] for one in trials)} "
            f"| `{best['strategy']}` | {times[0]:.0f} "
            f"| `{tuned['strategy']}` | {len(tuned['trials'])} | {times[1]:.0f} | {tuned['held_gib']:.1f} "
            f"| `{full['strategy']}` | {full['step_ms'] / best['step_ms'] - 1:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", help="searches whose job and ranks hold this text")
    parser.add_argument("--seconds", type=float, default=inf, help="no rehearsal begins after this time")
    parser.add_argument("--small", action="store_true", help="a small model on the CPU")
    parser.add_argument("--table", action="store_true", help="print what the file holds")
    parser.add_argument("--choose", action="store_true", help="only choose, by the rehearsals that the file holds")
    parser.add_argument("--least", type=int, help="with --choose: the smallest micro-batch")
    options = parser.parse_args()
    get_context("forkserver").set_forkserver_preload(preloaded("hf:"))  # before the first process starts its server
    results, until = Results(options.json), time.monotonic() + options.seconds
    searches = [one for one in (SMALL if options.small else SEARCHES) if options.only in f"{one.job} {one.world}"]
    if options.choose:
        for search in searches:
            choose(replace(search, least=options.least or search.least), results)
        return
    for search in searches if not options.table else ():
        run(search, results, until)
    table(results.rows)


if __name__ == "__main__":
    main()
