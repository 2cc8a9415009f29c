"""What `meshwright verify` asks for: references in a process of their own, then ranks, and a row for every strategy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.build.check import check
from meshwright.build.rehearsal import rehearse
from meshwright.errors import BadInput, MeshwrightError, RankFailed, Refused, StrategyError
from meshwright.facts.data_axis import usual_terms
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, first_axes
from meshwright.facts.strategy import Strategy
from meshwright.runtime.command import count_ranks, find_place, known_device, look
from meshwright.runtime.compare_choice import Choice
from meshwright.runtime.environment import launched
from meshwright.runtime.launch import launch
from meshwright.runtime.place import choose_device
from meshwright.runtime.references import cause_elsewhere, make_elsewhere, own_place, reference_of
from meshwright.runtime.verdict import DIFFERS, FAILED, REFUSED, without_verdict
from meshwright.runtime.worker import run_verify
from meshwright.strategies import Place

REFERENCE = "plain PyTorch"
Row = dict[str, Any]


def verify_command(
    *, job: str, strategies: list[str], ranks: int | None, device: str | None, steps: int, seed: int, timeout: float
) -> Row | None:
    """Verify; returns the JSON document, or None on a rank that has nothing to print."""
    chosen = choose_device(known_device(device))
    count = count_ranks(ranks, default=2)
    loaded, facts = look(job)
    choices = choose(loaded, facts, find_place(chosen, count), strategies)
    able = [choice.strategy for choice in choices if choice.strategy is not None]
    alone = dict.fromkeys(str(reference_of(strategy, facts, loaded.global_batch)) for strategy in able)
    request = {
        **{"verb": "verify", "job": job, "steps": steps, "seed": seed, "device": chosen, "facts": facts.to_json()},
        **{"timeout": timeout, "references": None},
    }
    place = launched()
    names = [*alone, *(choice.text for choice in choices if choice.strategy is not None and choice.text not in alone)]
    refused = {one.text: without_verdict(one.text, REFUSED, one.reason).to_json() for one in choices if one.reason}
    with TemporaryDirectory(prefix="meshwright-verify-") as folder:
        if able and (place is None or place.rank == 0):
            make_elsewhere(request, [Strategy.parse(text) for text in alone] + able, Path(folder))
        request |= {"references": folder, "strategies": names}
        if not able:
            rows = []
        elif place is not None:
            with redirect_stdout(sys.stderr):
                rows = run_verify(request, patience=timedelta(hours=4))  # the others wait for rank 0's references
        else:
            rows = _verify_all(request, count)
        if place is None or place.rank == 0:
            _explain(rows, facts, request, Path(folder))
    if place is not None and place.rank != 0:
        return None
    found = {row["strategy"]: row for row in rows} | refused
    order = dict.fromkeys([*alone, *(choice.text for choice in choices)])
    return {"reference": REFERENCE, "results": [found[text] for text in order]}


def _explain(rows: list[Row], facts: ModelFacts, request: Row, folder: Path) -> None:
    """Look for the cause of differences, where there are any."""
    different = [row for row in rows if row["status"] == DIFFERS]
    if not different:
        return
    cause = cause_elsewhere(request, folder)
    for row in different:
        row["cause"] = cause or _read_elsewhere(row["first_difference"], facts)


def _read_elsewhere(difference: str, facts: ModelFacts) -> str | None:
    """Whether what differs first is a parameter that the model reads outside of the module that holds it."""
    name = difference.removeprefix("gradient of ").partition(":")[0]
    if name not in facts.read_elsewhere:
        return None
    return f"{name} is read outside of the module that holds it, where a strategy may not bring it"


def choose(job: Job, facts: ModelFacts, place: Place, asked: Sequence[str]) -> list[Choice]:
    """What was asked for, each with its reason if it is refused; or all that fit, where nothing was asked for."""
    if asked:
        return [_choice(job, facts, text, place) for text in dict.fromkeys(asked)]
    found = [_choice(job, facts, text, place) for text in _usual(place)]
    for choice in found:
        if choice.strategy is None:
            print(f"left out: {choice.text}: {choice.reason}", file=sys.stderr)
    able = [choice for choice in found if choice.strategy is not None]
    if not able:
        raise Refused("No strategy fits this job and these ranks; see the reasons above.")
    return able


def _usual(place: Place) -> list[str]:
    """The data strategies and the plainest of the others."""
    hybrids = [f"2x{place.ranks // 2}"] if place.ranks % 2 == 0 and place.ranks > 2 else []
    names = list(usual_terms(lambda traits: traits.compared, hybrids))
    pairs = [str(AxisTerm.of(traits, 2)) for traits in first_axes()] if place.ranks % 2 == 0 else []
    return [*names, *pairs]


def _choice(job: Job, facts: ModelFacts, text: str, place: Place) -> Choice:
    strategy = Strategy.parse(text)
    try:
        resolved = check(job, facts, strategy, own_place(strategy, place))
        rehearse(job, facts, resolved)
        return Choice(text=text, strategy=resolved)
    except (Refused, StrategyError) as reason:
        return Choice(text=text, reason=str(reason))


def _verify_all(request: Row, ranks: int) -> list[Row]:
    """All verdicts. A strategy whose ranks fail is a verdict, too, and the rest go on in new ranks."""
    results: list[Row] = []
    names = request["strategies"]
    while len(results) < len(names):
        try:
            launch({**request, "strategies": names[len(results) :]}, ranks, results=results)
        except MeshwrightError as failure:
            if isinstance(failure, RankFailed):
                print(f"{failure.traceback.rstrip()}\n{failure}", file=sys.stderr)
            status = REFUSED if isinstance(failure, BadInput) else FAILED
            results.append(without_verdict(names[len(results)], status, str(failure)).to_json())
    return results
