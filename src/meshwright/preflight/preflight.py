"""Examine a described job: what matters under a strategy, or under which strategies something matters."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.assemble.check import check
from meshwright.errors import Refused, StrategyError
from meshwright.facts.data_axis import usual_terms
from meshwright.facts.finding import LEVELS, Finding, Level
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm
from meshwright.facts.strategy import Strategy
from meshwright.preflight import loss, parameters, state
from meshwright.preflight.collectives import collectives
from meshwright.preflight.division import uneven
from meshwright.preflight.passes import batch_changed, fixed_device, parameters_changed, steered
from meshwright.preflight.places import NOWHERE, CodePlace
from meshwright.preflight.randomness import dropout, dropout_in_eval, kept_generators, own_draws
from meshwright.preflight.subject import Case, Issue, Subject
from meshwright.strategies import Place

RULES = (
    *(parameters.unused, parameters.aliased, parameters.tied, parameters.frozen, parameters.read_elsewhere),
    *(state.moved, state.unsaved, state.batch_norm, state.frozen_batch_norm, state.evaluated),
    *(own_draws, loss.weight, loss.whole_batch, loss.mixed_samples, collectives),
)
"""What is asked about every described job."""
RULES_OF_CODE = (
    *(parameters.unregistered, parameters.not_updated, parameters.gradient_hooks, parameters.half, state.grown),
    *(kept_generators, dropout_in_eval, batch_changed, parameters_changed, steered, fixed_device),
)
"""What is asked about an author's code: they build the model once more, and run a small one."""
RULES_WITH_STRATEGY = (dropout, uneven)
"""What is asked only about a job under one strategy: sizes matter, or it would be said about most jobs."""
ALL = "every strategy"
POLICIES = {"mb": "single,mb=1", "ac": "single,ac=full", "compile": "single,compile"}
"""Policies of one process under which something may matter, each tried by a strategy."""


def examine(job: Job, facts: ModelFacts, strategy: Strategy, *, reads_code: bool = True) -> list[Finding]:
    """What matters under a resolved strategy, most serious first. Refusals of `check` are not among it.

    With `reads_code=False` only the description is asked.
    """
    subject = Subject(job, facts)
    case = Case(strategy, subject)
    issues = [
        *_issues(subject, reads_code),
        *(issue for rule in RULES_WITH_STRATEGY for issue in rule(subject, strategy)),
    ]
    found = [finding_of(issue, level, (str(strategy),)) for issue in issues if (level := issue.level(case))]
    return _sorted(found)


def examine_strategy(job: Job, facts: ModelFacts, strategy: Strategy, place: Place) -> list[Finding]:
    """What matters under a strategy on a number of ranks, with the reason if it cannot run there."""
    try:
        resolved = strategy.resolve(place.ranks)
    except Refused as reason:
        return [Finding(kind="refused", level="refused", what=str(reason), under=(str(strategy),))]
    found = examine(job, facts, resolved)
    try:
        check(job, facts, strategy, place)
    except (Refused, StrategyError) as reason:
        if not any(finding.level == "refused" for finding in found):  # else a rule has found its cause
            found.insert(0, _refusal(Subject(job, facts), resolved, str(reason)))
    return found


def examine_everywhere(job: Job, facts: ModelFacts) -> list[Finding]:
    """What matters under any strategy, with the terms of those where it does."""
    subject = Subject(job, facts)
    cases = {term: Case(strategy, subject) for term, strategy in _tried().items()}
    found = []
    for issue in _issues(subject):
        levels = {term: level for term, case in cases.items() if (level := issue.level(case))}
        if len(levels) == len(cases):  # the level that holds under each of them
            found.append(finding_of(issue, max(levels.values(), key=LEVELS.index), (ALL,)))
        elif levels:
            found.append(finding_of(issue, min(levels.values(), key=LEVELS.index), tuple(levels)))
    return _sorted(found)


def _tried() -> dict[str, Strategy]:
    """A strategy for every registered term, on as few ranks as it divides something over."""
    texts = {text.partition("=")[0]: text for text in usual_terms(lambda traits: traits.compared, ["2x2"])}
    texts |= {word: str(AxisTerm.of(traits, 2)) for word, traits in MODEL_AXES.items()}
    strategies = {}
    for term, text in (texts | POLICIES).items():
        parsed = Strategy.parse(text)
        ranks = 1 if parsed.traits.alone else parsed.data_size or (2 if parsed.data else parsed.model_ranks)
        strategies[term] = parsed.resolve(ranks)
    return strategies


def _issues(subject: Subject, reads_code: bool = True) -> Iterator[Issue]:
    for rule in (*RULES, *(RULES_OF_CODE if reads_code else ())):
        yield from rule(subject)


def finding_of(issue: Issue, level: Level, under: tuple[str, ...]) -> Finding:
    """An issue at a level, under some strategies."""
    place = issue.place if isinstance(issue.place, CodePlace) else issue.place()
    return Finding(
        kind=issue.kind,
        level=level,
        what=issue.what,
        module=issue.module,
        file=place.file,
        line=place.line,
        under=under,
        do=issue.do,
    )


def _refusal(subject: Subject, strategy: Strategy, reason: str) -> Finding:
    """A refusal, at the place of the longest name of a module or parameter that it mentions."""
    words = {word.strip(".,;:()'\"") for word in reason.split()}
    names = [name for name, _ in (*subject.model.named_modules(), *subject.model.named_parameters()) if name in words]
    name = max(names, key=len, default="")
    place: CodePlace = subject.made(name) if name else NOWHERE
    return Finding(
        kind="refused",
        level="refused",
        what=reason,
        module=name,
        file=place.file,
        line=place.line,
        under=(str(strategy),),
    )


def _sorted(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))
