"""Choose the strategies that `compare` runs: the named ones, or all plain ones for the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.assemble.check import check
from meshwright.assemble.dry_run import dry_run
from meshwright.errors import MeshwrightError, Refused
from meshwright.facts.data_axis import usual_terms
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm, first_axes
from meshwright.facts.strategy import Strategy
from meshwright.strategies import Place, model_axis


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A strategy as the user wrote it, with the checked strategy or the reason why it cannot run."""

    text: str
    strategy: Strategy | None = None
    reason: str = ""


def choose(job: Job, facts: ModelFacts, place: Place, named: list[str]) -> list[Choice]:
    """Check the named strategies, or all plain ones, before any process starts.

    A text that is no strategy is an error; a strategy that does not fit the job or the ranks gets a reason.
    """
    texts = dict.fromkeys(named or plain_strategies(place.ranks))
    choices = [_check(job, facts, place, text) for text in texts]
    if not any(choice.strategy for choice in choices):
        reasons = " ".join(f"{choice.text}: {choice.reason}" for choice in choices)
        raise Refused(f"No strategy fits this job and {place.ranks} ranks. {reasons}")
    return choices


def plain_strategies(ranks: int) -> Iterator[str]:
    """Each axis alone in every size, with all schedules if it uses all ranks, and the simplest mix."""
    if ranks == 1:
        yield "single"
        return
    hybrids = [f"{ranks // size}x{size}" for size in range(2, ranks) if ranks % size == 0]
    yield from usual_terms(lambda traits: traits.compared, hybrids)
    for word in MODEL_AXES:
        yield from model_axis(AxisTerm(word, ranks)).compared(ranks)
    if ranks % 4 == 0:
        inner, staged = first_axes()
        yield f"{AxisTerm.of(inner, 2)},{AxisTerm.of(staged, ranks // 2)}"


def _check(job: Job, facts: ModelFacts, place: Place, text: str) -> Choice:
    parsed = Strategy.parse(text)
    try:
        strategy = check(job, facts, parsed, place)
        dry_run(job, facts, strategy)
    except MeshwrightError as error:
        return Choice(text=text, reason=str(error))
    return Choice(text=text, strategy=strategy)
