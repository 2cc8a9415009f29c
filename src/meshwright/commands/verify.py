"""`meshwright verify`: make references in a separate process, run strategies in ranks, and collect a row for each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.assemble.check import check
from meshwright.assemble.dry_run import dry_run
from meshwright.commands.preflight import tell_findings
from meshwright.commands.train import load_and_describe
from meshwright.commands.worker import run_verify
from meshwright.environment import launched
from meshwright.errors import BadInput, MeshwrightError, RankFailed, Refused, StrategyError
from meshwright.facts.data_axis import usual_terms
from meshwright.facts.finding import Finding
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, first_axes
from meshwright.facts.strategy import Strategy
from meshwright.launch.launch import launch
from meshwright.runtime.place import choose_device, count_ranks, find_place, known_device
from meshwright.runtime.request import CauseTask, ReferenceTask, VerifyRequest, VerifyTask
from meshwright.strategies import Place
from meshwright.verify.references import find_cause_apart, own_place, reference_of, run_apart
from meshwright.verify.strategy_choice import Choice
from meshwright.verify.verdict import DIFFERS, FAILED, REFUSED, without_verdict

REFERENCE = "plain PyTorch"
Row = dict[str, Any]


def verify_command(request: VerifyRequest) -> Row | None:
    """Verify; returns the JSON document on rank 0, and None on other ranks."""
    device = choose_device(known_device(request.device))
    count = count_ranks(request.ranks, default=2)
    job, facts = load_and_describe(request.job)
    choices = choose(job, facts, find_place(device, count), request.strategies)
    able = [choice.strategy for choice in choices if choice.strategy is not None]
    alone = dict.fromkeys(str(reference_of(strategy, facts, job.global_batch)) for strategy in able)
    place = launched()
    is_main = place is None or place.rank == 0
    findings = tell_findings(job, facts, able) if is_main else []
    names = [*alone, *(choice.text for choice in choices if choice.strategy is not None and choice.text not in alone)]
    refused = {one.text: without_verdict(one.text, REFUSED, one.reason).to_json() for one in choices if one.reason}
    with TemporaryDirectory(prefix="meshwright-verify-") as folder:
        if able and is_main:
            wanted = (*map(Strategy.parse, alone), *able)
            run_apart(ReferenceTask(request=request, facts=facts, device=device, wanted=wanted), Path(folder))
        task = VerifyTask(request=request, facts=facts, device=device, references=Path(folder), strategies=tuple(names))
        if not able:
            rows = []
        elif place is not None:
            with redirect_stdout(sys.stderr):
                rows = run_verify(task, patience=timedelta(hours=4))  # the others wait for rank 0's references
        else:
            rows = _verify_all(task, count)
        if is_main:
            _explain(rows, task, findings)
    if not is_main:
        return None
    found = {row["strategy"]: row for row in rows} | refused
    order = dict.fromkeys([*alone, *(choice.text for choice in choices)])
    return {"reference": REFERENCE, "results": [found[text] for text in order]}


def _explain(rows: list[Row], task: VerifyTask, findings: list[Finding]) -> None:
    """Look for the cause of differences, if there are any."""
    different = [row for row in rows if row["status"] == DIFFERS]
    if not different:
        return
    cause = find_cause_apart(CauseTask(request=task.request, device=task.device), task.references)
    for row in different:
        row["cause"] = cause or _read_elsewhere(row["first_difference"], task.facts) or _warned(findings)


def _warned(findings: list[Finding]) -> str | None:
    """The first warning of the preflight, as a possible cause."""
    return next((f"perhaps: {one.what}" for one in findings if one.level == "warning"), None)


def _read_elsewhere(difference: str, facts: ModelFacts) -> str | None:
    """A cause if the first difference is a parameter that the model reads outside the module that holds it."""
    name = difference.removeprefix("gradient of ").partition(":")[0]
    if name not in facts.read_elsewhere:
        return None
    return f"{name} is read outside of the module that holds it, where a strategy may not bring it"


def choose(job: Job, facts: ModelFacts, place: Place, named: Sequence[str]) -> list[Choice]:
    """The named strategies, with a reason for each that is refused; without names, all usual ones that fit."""
    if named:
        return [_choice(job, facts, text, place) for text in dict.fromkeys(named)]
    found = [_choice(job, facts, text, place) for text in _usual(place)]
    for choice in found:
        if choice.strategy is None:
            print(f"left out: {choice.text}: {choice.reason}", file=sys.stderr)
    able = [choice for choice in found if choice.strategy is not None]
    if not able:
        raise Refused("No strategy fits this job and these ranks; see the reasons above.")
    return able


def _usual(place: Place) -> list[str]:
    """The data strategies, and the first model axes of size 2."""
    hybrids = [f"2x{place.ranks // 2}"] if place.ranks % 2 == 0 and place.ranks > 2 else []
    pairs = [str(AxisTerm.of(traits, 2)) for traits in first_axes()] if place.ranks % 2 == 0 else []
    return [*usual_terms(lambda traits: traits.compared, hybrids), *pairs]


def _choice(job: Job, facts: ModelFacts, text: str, place: Place) -> Choice:
    strategy = Strategy.parse(text)
    try:
        resolved = check(job, facts, strategy, own_place(strategy, place))
        dry_run(job, facts, resolved)
        return Choice(text=text, strategy=resolved)
    except (Refused, StrategyError) as reason:
        return Choice(text=text, reason=str(reason))


def _verify_all(task: VerifyTask, ranks: int) -> list[Row]:
    """All verdicts. If the ranks of a strategy fail, that is its verdict, and new ranks verify the rest."""
    results: list[Row] = []
    names = task.strategies
    while len(results) < len(names):
        try:
            launch(replace(task, strategies=names[len(results) :]), ranks, results=results)
        except MeshwrightError as failure:
            if isinstance(failure, RankFailed):
                print(f"{failure.traceback.rstrip()}\n{failure}", file=sys.stderr)
            status = REFUSED if isinstance(failure, BadInput) else FAILED
            results.append(without_verdict(names[len(results)], status, str(failure)).to_json())
    return results
