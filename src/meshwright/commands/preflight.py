"""`meshwright preflight`, and what the other verbs say about a job before any process starts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from typing import Any

from meshwright.describe.code_lines import failed_line
from meshwright.describe.collectives_in_code import find_collectives
from meshwright.describe.model import describe
from meshwright.errors import JobError, MeshwrightError
from meshwright.facts.finding import Finding
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.preflight.collectives import collective_issues
from meshwright.preflight.places import NOWHERE, CodePlace, place_changed, place_made, place_of_function
from meshwright.preflight.preflight import ALL, examine, examine_everywhere, examine_strategy, finding_of
from meshwright.recording.blueprint import model_to_read
from meshwright.strategies import Place


def preflight_command(*, job: str, strategy: str | None, ranks: int | None) -> dict[str, Any]:
    """The findings as a JSON document."""
    parsed = None if strategy is None else Strategy.parse(strategy)
    with redirect_stdout(sys.stderr):
        loaded = load_job(job)
        found = examine_job(loaded, parsed, ranks)
    return {
        "job": job,
        "strategy": None if parsed is None else str(parsed),
        "ranks": None if parsed is None else ranks_of(parsed, ranks),
        "findings": [finding.to_json() for finding in found],
        "failed": any(one.level == "refused" and (parsed is not None or one.under == (ALL,)) for one in found),
    }


def ranks_of(strategy: Strategy, ranks: int | None) -> int:
    """The given number of ranks, or as few as divide something."""
    if ranks is not None or strategy.traits.alone:
        return ranks or 1
    if strategy.data_size is not None:
        return strategy.data_size * strategy.model_ranks
    return (2 if strategy.data is not None else 1) * strategy.model_ranks


def examine_job(
    job: Job, strategy: Strategy | None = None, ranks: int | None = None, facts: ModelFacts | None = None
) -> list[Finding]:
    """What matters under a strategy, or under any; a job that cannot be described is a finding, too."""
    try:
        facts = facts or describe(job)
    except JobError as error:
        return [*_collectives(job), _mistake(job, error)]
    if strategy is None:
        return examine_everywhere(job, facts)
    count = ranks_of(strategy, ranks)
    device = "cuda" if strategy.graphs else "cpu"  # a CPU would refuse CUDA graphs
    return examine_strategy(job, facts, strategy, Place(device=device, devices=count, ranks=count, local_ranks=count))


def _mistake(job: Job, error: JobError) -> Finding:
    """Why a job cannot be described, at the place of the parameter that it is about."""
    line = failed_line(error.__cause__) if error.__cause__ else None
    place = CodePlace(line.file, line.line) if line else NOWHERE
    if error.name:
        model = _unfinished(job)
        place = (place_changed if error.kind == "parameter-made-in-forward" else place_made)(model, error.name)
        place = place if place.line else place_of_function(job.model)
    return Finding(
        kind=error.kind,
        level="refused",
        what=str(error),
        module=error.name,
        file=place.file,
        line=place.line,
        under=(ALL,),
    )


def _unfinished(job: Job) -> Any:
    """The model without weights, or built plainly if it cannot be recorded."""
    try:
        return model_to_read(job.model)
    except MeshwrightError:
        return job.model()


def _collectives(job: Job) -> list[Finding]:
    """Collectives in the code of a job whose model does not run: they may be the reason."""
    try:
        model = model_to_read(job.model)
    except MeshwrightError:
        return []
    issues = collective_issues(find_collectives(model, job.loss), type(model).__name__)
    return [finding_of(issue, "warning", (ALL,)) for issue in issues]


def tell_findings(job: Job, facts: ModelFacts, strategies: Sequence[Strategy]) -> list[Finding]:
    """Print to stderr what matters under resolved strategies, and return it."""
    found = merged(finding for strategy in strategies for finding in examine(job, facts, strategy))
    for finding in found:
        print(finding.sentence(names=len(strategies) > 1), file=sys.stderr)
    return found


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Equal findings of several strategies as one, under all of them."""
    groups: dict[tuple[str, str, str, int], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.kind, one.module, one.file, one.line), []).append(one)
    return [
        Finding(**{**vars(group[0]), "under": tuple(dict.fromkeys(term for one in group for term in one.under))})
        for group in groups.values()
    ]
