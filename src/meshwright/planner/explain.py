"""Explain to the user why the first plan won, and what each other plan would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

from meshwright.facts.plan import Plan
from meshwright.planner.candidates import complexity
from meshwright.planner.search import TIE
from meshwright.units import GIB

CAUSES = {
    "compute": "computing",
    "host": "waiting for the host",
    "bubble": "idle in the pipeline",
    "stages": "sending between stages",
    "update": "the optimizer",
    "host copies": "copying to and from the host",
}
"""Descriptions of the causes of time, except the communication of an axis."""


def explain(plans: list[Plan], *, safe: float = inf, room: float = inf, all_found: Sequence[Plan] = ()) -> list[Plan]:
    """Add reasons to plans: the first is compared with the next slower one, the others with the first.

    Plans with a peak above `safe` bytes may not fit, considering the error of forecasts, and above `room` they do not.
    `all_found` are all plans of a search, listed or not, among which the best without an axis is found.
    """
    if not plans:
        return []
    first, *others = plans
    why = (*_why_first(first, others, safe), *_without_axes(first, all_found), *_routing(first, room))
    return [replace(first, why=why), *(replace(p, why=_why_not(p, first)) for p in others)]


def _why_first(first: Plan, others: list[Plan], safe: float) -> tuple[str, ...]:
    sentences = [f"{_share(first)}."]
    ties = [plan for plan in others if abs(plan.forecast.step / first.forecast.step - 1) <= TIE]
    slower = [plan for plan in others if plan.forecast.step > first.forecast.step * (1 + TIE)]
    crowded = [plan for plan in ties if plan.forecast.peak > safe >= first.forecast.peak]
    if crowded:
        sentences.append(f"Equally fast within the error bar, but with too little memory to spare: {_listed(crowded)}.")
    if rest := [plan for plan in ties if plan not in crowded]:
        simplest = all(complexity(plan.strategy) > complexity(first.strategy) for plan in rest)
        compared = "but more complex" if simplest else "and not simpler"
        sentences.append(f"Equally fast within the error bar, {compared}: {_listed(rest)}.")
    if slower:
        longer = slower[0].forecast.step / first.forecast.step - 1
        sentences.append(f"{slower[0].strategy} would take {longer:.0%} longer: {_difference(slower[0], first)}.")
    return tuple(sentences)


def _without_axes(first: Plan, plans: Sequence[Plan]) -> Iterator[str]:
    """What the axes gain that divide samples or experts over ranks which could have had whole ones."""
    for term in first.strategy.axes if plans else ():
        if not (term.traits.shares_gradients or term.traits.splits_batch):
            continue
        rest = [plan for plan in plans if all(other.word != term.word for other in plan.strategy.axes)]
        if not rest:
            yield f"Without {term.word}, nothing fits."
            continue
        best = min(rest, key=lambda plan: plan.forecast.step)
        longer = best.forecast.step / first.forecast.step - 1
        if longer > TIE:
            why = _difference(best, first)
            yield f"Without {term.word}, the fastest is {best.strategy}, {longer:.0%} slower: {why}."


def _routing(plan: Plan, room: float) -> tuple[str, ...]:
    """What routing is assumed, and what the worst would cost."""
    if plan.worst is None:
        return ()
    if plan.worst.peak <= plan.forecast.peak and plan.worst.step <= plan.forecast.step:
        return ("Each rank computes the experts of its own tokens, so memory and time do not depend on the routing.",)
    held = f"{plan.worst.peak / GIB:.1f} GiB" + (", which does not fit" if plan.worst.peak > room else "")
    return (
        "Routing is taken as balanced: if all tokens chose experts of one rank, a step would take "
        f"{_milliseconds(plan.worst.step)} and {held}.",
    )


def _listed(plans: list[Plan]) -> str:
    names = ", ".join(str(plan.strategy) for plan in plans[:3])
    return names + (f" and {len(plans) - 3} more" if len(plans) > 3 else "")


def _why_not(plan: Plan, first: Plan) -> tuple[str, ...]:
    saved = (first.peak - plan.peak) / GIB
    ratio = plan.forecast.step / first.forecast.step - 1
    saved = 0.0 if abs(saved) < 0.05 else saved
    more = f"take {-saved:.1f} GiB more" if saved else "take as much memory"
    memory = f"save {saved:.1f} GiB" if saved > 0 else more
    time = f"cost {ratio:.0%}" if ratio > TIE else "be as fast" if ratio >= -TIE else f"be {-ratio:.0%} faster"
    joined = "and" if not saved or (saved > 0) == (ratio <= TIE) else "but"
    sentence = f"would {memory} {joined} {time}"
    return (f"{sentence}: {_difference(plan, first)}." if ratio > TIE else f"{sentence}.",)


def _share(plan: Plan) -> str:
    """The two largest parts of the step's time."""
    step = plan.forecast.step
    parts = sorted(plan.forecast.time.items(), key=lambda part: -part[1])[:2]
    listed = [f"{_worded(cause)} {seconds / step:.0%}" for cause, seconds in parts if seconds / step >= 0.01]
    return f"Of a step of {_milliseconds(step)}, {' and '.join(listed)}"


def _difference(plan: Plan, other: Plan) -> str:
    """The cause that makes one plan slower than the other: the one that grows most."""
    change = plan.forecast - other.forecast
    cause, seconds = max(change.time.items(), key=lambda part: part[1])
    return f"{_milliseconds(seconds)} more of {_worded(cause)}"


def _worded(cause: str) -> str:
    return CAUSES.get(cause, f"waiting for the {cause} axis")


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def advise(tightest: Plan | None, room: float, tries: list[tuple[str, Callable[[], Plan | None]]]) -> tuple[str, ...]:
    """Suggest changes when nothing fits; each of `tries` is a change and the plan that it makes possible, if any."""
    if tightest is None:
        return ("No candidate can run here; each one's reason is listed under refused.",)
    need = tightest.forecast.peak / GIB
    advice = [f"Nothing fits: the smallest is {tightest.strategy} with {need:.1f} of {room / GIB:.1f} GiB."]
    for change, attempt in tries:
        plan = attempt()
        if plan is not None:
            held = f"{plan.forecast.peak / GIB:.1f} GiB"
            advice.append(f"{change} would fit: {plan.strategy}, {held}, {_milliseconds(plan.forecast.step)} a step.")
    if len(advice) == 1:
        advice.append(
            "Recomputing, offloading or eight times the devices would not make it fit: the model is too large."
        )
    return tuple(advice)
