"""Measure strategies against each other on this machine: several rounds, each of which launches every strategy once.

Every launch starts new processes. So nothing that one strategy leaves behind (cached memory, threads, a broken process
group) affects the next, peak memory belongs to one strategy, and a failure becomes a row. A launch takes seconds, so
there are few rounds. Every other round runs backwards: a machine that slows down for a while slows all strategies.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from meshwright.compare.row import Basis, empty_row, make_row, step_seconds
from meshwright.compare.start import OK, REFUSED, LaunchOutcome, start
from meshwright.describe.model import describe
from meshwright.environment import launched, silent_profiler
from meshwright.errors import BadInput
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.runtime.place import choose_device, known_device, place_for
from meshwright.runtime.request import CompareRequest, CompareTask
from meshwright.verify.references import reference_of
from meshwright.verify.strategy_choice import Choice, choose

Tell = Callable[[str], None]
Start = Callable[..., LaunchOutcome]
Outcomes = dict[tuple[str, bool], list[LaunchOutcome]]
"""By a strategy's text and whether it is a reference; one outcome per round."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Results of a comparison: rows, and profiles for traces."""

    matrix: Matrix
    rows: list[dict[str, Any]]
    references: list[dict[str, Any]]
    """Rows of the single processes that losses are compared with."""
    left_out: list[dict[str, str]]
    """Strategies that do not fit this job or these ranks, with reasons."""
    seconds: float
    profiles: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By strategy, spans of the profiled step of every rank."""
    interrupted: bool = False
    """Whether the user stopped it before the end."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One launch in the matrix of rounds and strategies."""

    text: str
    strategy: Strategy
    ranks: int
    round: int
    """From 1; 0 for a reference."""

    @property
    def is_reference(self) -> bool:
        return self.round == 0

    @property
    def words(self) -> str:
        return f"round {self.round}, {self.text}" if self.round else f"one process for the losses, {self.text}"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The strategies to run, and the job that they run."""

    job: Job
    facts: ModelFacts
    device: str
    choices: list[Choice]

    @property
    def able(self) -> dict[str, Strategy]:
        """Strategies that can run, by the text that the user wrote."""
        return {choice.text: choice.strategy for choice in self.choices if choice.strategy is not None}

    @property
    def references(self) -> dict[str, str]:
        """For each strategy that can run, the single process that its losses are compared with."""
        batch = self.job.global_batch
        return {text: str(reference_of(strategy, self.facts, batch)) for text, strategy in self.able.items()}

    def cells(self, *, ranks: int, rounds: int) -> Iterator[Cell]:
        """All launches in order: references, then rounds, every other one backwards."""
        for text in dict.fromkeys(self.references.values()):
            yield Cell(text=text, strategy=Strategy.parse(text), ranks=1, round=0)
        for number in range(1, rounds + 1):
            for text, strategy in self.able.items() if number % 2 else reversed(self.able.items()):
                processes = 1 if strategy.traits.one_process else ranks
                yield Cell(text=text, strategy=strategy, ranks=processes, round=number)


def compare(request: CompareRequest, *, tell: Tell | None = None, start: Start = start) -> Compared:
    """Run all strategies of a request; the failure of one is recorded in its row."""
    began = time.perf_counter()
    matrix, tell = check_request(request), tell or partial(print, file=sys.stderr, flush=True)
    with silent_profiler():
        outcomes, interrupted = run_cells(request, matrix, tell=tell, start=start)
    rows, references = _rows(matrix, outcomes)
    named = bool(request.strategies)
    refused = [choice for choice in matrix.choices if choice.strategy is None]
    return Compared(
        matrix=matrix,
        rows=with_best([*rows, *(empty_row(one.text, REFUSED, one.reason) for one in refused if named)]),
        references=references,
        left_out=[{"strategy": one.text, "reason": one.reason} for one in refused if not named],
        seconds=time.perf_counter() - began,
        profiles={text: _spans(outcomes[text, False]) for text in matrix.able},
        interrupted=interrupted,
    )


def check_request(request: CompareRequest) -> Matrix:
    """Refuse what cannot run, before any process starts."""
    if launched() is not None:
        raise BadInput("compare launches ranks itself, many times; run it without torchrun or srun, with --ranks.")
    device = choose_device(known_device(request.device))
    with redirect_stdout(sys.stderr):
        job = load_job(request.job)
        facts = describe(job)
        choices = choose(job, facts, place_for(device, request.ranks), list(request.strategies))
    return Matrix(job=job, facts=facts, device=device, choices=choices)


def run_cells(request: CompareRequest, matrix: Matrix, *, tell: Tell, start: Start) -> tuple[Outcomes, bool]:
    """Outcomes of all launches, and whether the user interrupted them.

    A strategy that failed is not launched again. An interrupt before the first outcome of a strategy is raised.
    """
    planned = list(matrix.cells(ranks=request.ranks, rounds=request.rounds))
    found: Outcomes = {(cell.text, cell.is_reference): [] for cell in planned}
    began = time.perf_counter()
    for done, cell in enumerate(planned, start=1):
        earlier = found[cell.text, cell.is_reference]
        if any(outcome.status != OK for outcome in earlier):
            continue
        task = CompareTask(
            request=request, facts=matrix.facts, device=matrix.device, strategy=cell.strategy, profile=cell.round == 1
        )
        try:
            earlier.append(start(task, cell.ranks, timeout=request.timeout))
        except KeyboardInterrupt:
            if not any(outcomes for (_, is_reference), outcomes in found.items() if not is_reference):
                raise
            tell(f"[{done}/{len(planned)}] {cell.words}: interrupted; the results so far follow")
            return found, True
        left = (time.perf_counter() - began) / done * (len(planned) - done)
        rest = f" ({left:.0f} s left)" if done < len(planned) else ""
        tell(f"[{done}/{len(planned)}] {cell.words}: {in_short(earlier[-1])}{rest}")
    return found, False


def in_short(outcome: LaunchOutcome) -> str:
    """An outcome in a few words, for the progress line."""
    if outcome.measured is None:
        return f"{outcome.status.upper()}: {outcome.reason}"
    return f"{1e3 * median(step_seconds(outcome.measured)):.0f} ms a step"


def with_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their speed relative to the fastest, fastest first; rows without figures come last."""
    times = [row["step_ms"] for row in rows if row["step_ms"]]
    rated = [{**row, "against_best": min(times) / row["step_ms"] if row["step_ms"] else None} for row in rows]
    return sorted(rated, key=lambda row: row["step_ms"] or float("inf"))


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def note_on_cores(ranks: int, device: str) -> str:
    """A warning if ranks share cores, which makes idle time and communication look larger; empty otherwise."""
    cores = count_cores()
    if device != "cpu" or ranks <= cores:
        return ""
    return (
        f"{ranks} CPU ranks share {cores} cores and take turns on them: a rank that waits for a core looks as if it "
        "computed, and its peers as if they communicated. Times compare strategies here, not on devices of their own."
    )


def _rows(matrix: Matrix, outcomes: Outcomes) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the strategies, and of the single processes that they are compared with."""
    references = matrix.references
    ones = {text: outcomes[text, True] for text in dict.fromkeys(references.values())}
    losses = {text: one[0].measured["losses"] for text, one in ones.items() if one and one[0].measured is not None}
    basis = Basis(facts=matrix.facts, global_batch=matrix.job.global_batch, references=losses)
    rows = [
        make_row(text, strategy, outcomes[text, False], references[text], basis)
        for text, strategy in matrix.able.items()
    ]
    return rows, [make_row(text, Strategy.parse(text), one, text, basis) for text, one in ones.items()]


def _spans(outcomes: list[LaunchOutcome]) -> list[dict[str, Any]]:
    """Profiles of all ranks, from the first round."""
    measured = outcomes[0].measured if outcomes else None
    return [rank["profile"] for rank in measured["ranks"] if rank["profile"] is not None] if measured else []
