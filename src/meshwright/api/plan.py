"""Rank plans: search candidates, trace the finalists, and compare the user's own config."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from math import inf

from meshwright.api.finalists import Finals, settle
from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.describe.model import describe
from meshwright.errors import MeshwrightError, Refused
from meshwright.exchange import Imported
from meshwright.facts.cluster import Cluster
from meshwright.facts.finding import Finding
from meshwright.facts.job import Job
from meshwright.facts.plan import ForeignChoice, Plan, Ranking, Refusal
from meshwright.facts.strategy import Strategy, divisors
from meshwright.planner.account import usable
from meshwright.planner.explain import explain
from meshwright.planner.search import TIE, PlanContext, best_of_each_kind, choose, consider, refuse, safe_room
from meshwright.planner.worst_routing import with_worst_routing
from meshwright.preflight.preflight import examine
from meshwright.units import GIB, show_seconds

WORTH = 1.3
"""How many times as fast CUDA graphs must be to be offered."""


def plan(job: Job, cluster: Cluster, options: PlanOptions | None = None, *, name: str = "job") -> Ranking:
    """Rank all strategies for a job on a cluster; the finalists are traced unless `options.fast`."""
    options, started = options or PlanOptions(), time.perf_counter()
    planner = Planner(
        job,
        describe(job),
        options.global_batch or job.global_batch,
        options.calibration,
        kernels=options.kernels,
        time_host=options.time_host,
    )
    return rank(planner, cluster, options, name=name, started=started)


def rank(
    planner: Planner, cluster: Cluster, options: PlanOptions, *, name: str = "job", started: float | None = None
) -> Ranking:
    """Rank with an existing planner, for repeated requests. `started` is when the measured time starts."""
    started, known = started or time.perf_counter(), len(planner.notes)
    found = planner.search(cluster, options)
    # Every strategy that the user named is listed or refused; of a search, only the best of each kind.
    context = planner.context(cluster)

    def ranked(plans: list[Plan]) -> list[Plan]:
        return choose(context, plans if options.strategies else best_of_each_kind(context, plans))

    if options.fast:
        finals = Finals(ranked(found.plans))
    else:
        finals = settle(
            found.plans,
            rank=ranked,
            trace=partial(planner.traced if options.strategies else planner.roughly_traced, cluster),
            decide=partial(planner.decided, cluster),
            count=options.finalists,
            # A strategy that the user named is not judged by the trace of another one.
            room=inf if options.strategies else usable(context.hardware),
        )
    plans, unfit = finals.plans, finals.unfit
    listed = [with_worst_routing(context, one) for one in (plans if options.strategies else plans[: options.listed])]
    advice = () if plans else planner.advise(cluster, options, found)
    offer = () if options.strategies else _offer_graphs(context, plans)
    return Ranking(
        job=name,
        cluster=str(cluster),
        plans=tuple(
            explain(
                listed,
                safe=safe_room(context),
                room=usable(context.hardware),
                all_found=() if options.strategies else plans,
            )
        ),
        refused=(*found.refused, *(Refusal(strategy=str(plan.strategy), reason=plan.why[0]) for plan in unfit)),
        candidates=found.candidates,
        seconds=time.perf_counter() - started,
        advice=(
            *options.fitted,
            *planner.facts.assumed,
            *planner.notes[known:],
            *filter(None, [finals.note]),
            *advice,
            *offer,
        ),
        against=rank_foreign(planner, cluster, options.against, plans, traced=not options.fast)
        if options.against
        else None,
        findings=_findings(planner, plans, name),
    )


def _findings(planner: Planner, plans: list[Plan], name: str) -> tuple[Finding, ...]:
    """What matters under the first plan. The code of presets is not read, which takes longer than planning."""
    if not plans:
        return ()
    job = replace(planner.job, global_batch=planner.global_batch)
    return tuple(examine(job, planner.facts, plans[0].strategy, reads_code=not name.startswith("preset:")))


def _offer_graphs(context: PlanContext, plans: list[Plan]) -> tuple[str, ...]:
    """A sentence if the first plan would be much faster with CUDA graphs, because it waits for the host."""
    if not plans or plans[0].strategy.graphs or context.hardware.device == "cpu":
        return ()
    try:
        other = consider(context, replace(plans[0].strategy, graphs=True))
    except MeshwrightError:
        return ()
    gain = plans[0].forecast.step / other.forecast.step
    if gain < WORTH or not other.fits:
        return ()
    return (
        f"{plans[0].strategy} waits for its host; {other.strategy} would be {gain:.1f} times as fast "
        f"({show_seconds(other.forecast.step)} a step). Use --graphs to rank such plans.",
    )


def rank_foreign(
    planner: Planner, cluster: Cluster, theirs: Imported, plans: list[Plan], *, traced: bool
) -> ForeignChoice:
    """Forecast the user's strategy and find its rank among `plans`, which are already sorted."""
    notes = _notes(theirs, planner.global_batch)
    choice = partial(ForeignChoice, file=theirs.file, origin=theirs.origin)
    engine = theirs.strategy.engine
    try:
        plan = _forecast(planner, cluster, replace(theirs.strategy, engine="torch"), plans, traced=traced)
    except MeshwrightError as error:
        gain = f"Your strategy cannot run here; {_first(plans)}."
        return choice(strategy=str(theirs.strategy), gain=gain, reason=str(error), notes=notes)
    plan = plan if engine == "torch" else replace(plan, strategy=replace(plan.strategy, engine=engine))
    strategy = str(plan.strategy)
    if theirs.strategy.micro_batch is None and plan.strategy.micro_batch is not None:
        notes = (*notes, f"The file sets no micro-batch size; mb={plan.strategy.micro_batch} is the fastest here.")
    if not plan.fits:
        gain = f"Your strategy does not fit; {_first(plans)}."
        return choice(strategy=strategy, gain=gain, plan=plan, reason=plan.why[0], notes=notes)
    place = _rank(planner, cluster, plan, plans)
    explained = explain([plans[0] if plans else plan, plan])[1]
    return choice(strategy=strategy, gain=_gain(plan, plans), plan=explained, rank=place, notes=notes)


def _notes(theirs: Imported, global_batch: int) -> tuple[str, ...]:
    notes = [f"Not compared, because Meshwright has no equivalent: {name}." for name in theirs.ignored]
    if theirs.strategy.engine == "deepspeed":
        notes.append("DeepSpeed is forecast as Meshwright's own engine at the same ZeRO stage.")
    if theirs.global_batch not in (None, global_batch):
        notes.append(f"The file's global batch is {theirs.global_batch}; the plan uses the job's, {global_batch}.")
    return tuple(notes)


def _forecast(planner: Planner, cluster: Cluster, strategy: Strategy, plans: list[Plan], *, traced: bool) -> Plan:
    """Forecast the user's strategy, even if it does not fit; raise `Refused` if it cannot run."""
    resolved = strategy.resolve(cluster.devices)
    if reason := refuse(planner.context(cluster), resolved):
        raise Refused(reason)
    found = planner.search_named(cluster, _sizes(resolved, planner.global_batch))
    if not found.plans and not found.unfit:
        raise Refused(found.refused[0].reason)
    best = found.plans[0] if found.plans else min(found.unfit, key=lambda plan: plan.forecast.peak)
    same = next((plan for plan in plans if plan.strategy == best.strategy), None)
    if same is not None or not traced or not best.fits:
        return same or best
    checked = planner.traced(cluster, best)
    return checked if checked.fits else replace(best, fits=False, why=("the traced step does not fit",))


def _sizes(strategy: Strategy, global_batch: int) -> list[Strategy]:
    """The strategy with its micro-batch size, or with every possible size, smallest first, if it names none."""
    if strategy.micro_batch is not None:
        return [strategy]
    samples = max(1, global_batch // strategy.data_ranks)
    return [replace(strategy, micro_batch=size) for size in divisors(samples)]


def _rank(planner: Planner, cluster: Cluster, plan: Plan, plans: list[Plan]) -> int:
    """The plan's rank, starting at 1, by the same rule that ranks the others."""
    if not any(other is plan for other in plans):
        together = sorted([*plans, plan], key=lambda other: other.forecast.step)
        plans = choose(planner.context(cluster), together)
    return 1 + next(place for place, other in enumerate(plans) if other is plan)


def _first(plans: list[Plan]) -> str:
    if not plans:
        return "no plan fits either"
    return f"the first plan, {plans[0].strategy}, takes {show_seconds(plans[0].forecast.step)} per step"


def _gain(plan: Plan, plans: list[Plan]) -> str:
    """Describe what the first plan gains over a plan that fits."""
    if not plans:
        return "Your strategy fits, and no plan does."
    first = plans[0]
    if first.strategy == plan.strategy:
        return "The first plan is your strategy: there is nothing to gain."
    ratio, more = 1 - first.forecast.step / plan.forecast.step, (first.peak - plan.peak) / GIB
    times = f"{show_seconds(first.forecast.step)} instead of {show_seconds(plan.forecast.step)}"
    memory = "the same memory" if abs(more) < 0.05 else f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'} memory"
    if abs(ratio) <= TIE:
        return f"The first plan is as fast as yours ({times} per step) and takes {memory}."
    speed = f"{ratio:.0%} less time" if ratio > 0 else f"{-ratio:.0%} more time"
    return f"The first plan takes {speed} per step than yours ({times}) and takes {memory}."
