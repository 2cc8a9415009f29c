"""Plan a job along a swept quantity: devices, global batch, sequence length, or the link between nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from meshwright.api.described_presets import JobDescription, describe_job
from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.api.sweep_range import SweepRange
from meshwright.errors import BadInput
from meshwright.facts.cluster import Cluster
from meshwright.facts.plan import Plan, Refusal
from meshwright.facts.strategy import Strategy
from meshwright.facts.sweep import Point, Sweep
from meshwright.jobs.load import load_job
from meshwright.jobs.options import split_options
from meshwright.planner.account import usable
from meshwright.planner.crossings import Stop, kind_of, lead_changes, overtakings
from meshwright.planner.search import best_of_each_kind, choose

Tell = Callable[[str], None]
BITS = 8
"""Of a byte: a cluster's link is in Gbit/s, and a sweep's in GB/s."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What is planned for at one value."""

    value: float
    job: str
    cluster: Cluster
    batch: int | None
    """None: the job's."""


def sweep(
    job: str, cluster: Cluster, swept: SweepRange, options: PlanOptions, *, tell: Tell = lambda words: None
) -> Sweep:
    """The best plan of each kind at every value, in closed form; named strategies are kinds of their own.

    Wrong values are errors before anything is described. `tell` is called with a sentence before each value.
    """
    started, places = time.perf_counter(), list(_places(job, cluster, swept, options))
    described: dict[str, JobDescription] = {}
    points: list[Point] = []
    for number, place in enumerate(places, 1):
        tell(f"{swept.quantity}={place.value:g}: {number} of {len(places)}")
        if place.job not in described:
            described[place.job] = describe_job(place.job)
        known = described[place.job]
        batch = place.batch or known.job.global_batch
        planner = Planner(
            known.job, known.facts, batch, options.calibration, known.costs, options.kernels, options.time_host
        )
        points.append(_point(planner, place, options))
    stops = [Stop(point.value, point.plans, point.best) for point in points]
    return Sweep(
        job=job,
        cluster=str(cluster),
        quantity=swept.quantity,
        unit=swept.unit,
        points=tuple(points),
        crossings=tuple(overtakings(stops) if options.strategies else lead_changes(stops)),
        seconds=time.perf_counter() - started,
        advice=options.fitted,
    )


def _places(job: str, cluster: Cluster, swept: SweepRange, options: PlanOptions) -> Iterator[_Place]:
    if swept.quantity == "link" and cluster.nodes == 1:
        raise BadInput(f"A sweep over link needs several nodes, but {cluster} is one; write 2x{cluster} or more.")
    if swept.quantity == "batch" and options.global_batch is not None:
        raise BadInput("--batch names the global batch that --sweep batch=... varies; leave one of them out.")
    for value in swept.values:
        place = _Place(value=value, job=job, cluster=cluster, batch=options.global_batch)
        if swept.quantity == "devices":
            yield replace(place, cluster=_with_devices(cluster, int(value)))
        elif swept.quantity == "batch":
            yield replace(place, batch=int(value))
        elif swept.quantity == "sequence":
            yield replace(place, job=_with_sequence(job, int(value)))
        else:
            yield replace(place, cluster=replace(cluster, between_gbps=BITS * value, source=""))


def _with_devices(cluster: Cluster, devices: int) -> Cluster:
    """The cluster with more or fewer nodes; a part of one node if that is enough."""
    each = cluster.devices_per_node
    if devices <= each:
        return replace(cluster, nodes=1, devices_per_node=devices, source="")
    if devices % each:
        near = devices // each * each
        raise BadInput(
            f"--sweep devices: {devices} devices do not fill nodes of {each}; use a multiple, such as {near}, "
            f"or a cluster with other nodes than {cluster}."
        )
    return replace(cluster, nodes=devices // each, source="")


def _with_sequence(job: str, tokens: int) -> str:
    """The job's text with another sequence length; an error if it takes none."""
    prefix, colon, rest = job.partition(":")
    if prefix not in ("preset", "hf") or not colon:
        raise BadInput(
            f"A sweep over sequence needs a job that takes seq=, but {job} is a file; "
            "use a preset or hf:, or sweep devices, batch or link."
        )
    name, options = split_options(rest)
    batch = f",batch={options.batch}" if options.batch else ""
    text = f"{prefix}:{name}:seq={tokens}{batch}"
    load_job(text)  # raises if the model cannot have that many
    return text


def _point(planner: Planner, place: _Place, options: PlanOptions) -> Point:
    context = planner.context(place.cluster)
    kind = partial(_kind, several=len(options.allowed.precisions) > 1)
    if options.strategies:
        plans, refused, candidates = _named(planner, place.cluster, options.strategies)
    else:
        found = planner.search(place.cluster, options)
        plans = {kind(plan.strategy): plan for plan in best_of_each_kind(context, found.plans, kind)}
        refused, candidates = (), found.candidates
    chosen = choose(context, list(plans.values()))
    best = next((kind for kind, plan in plans.items() if chosen and plan is chosen[0]), None)
    return Point(
        value=place.value,
        cluster=str(place.cluster),
        devices=place.cluster.devices,
        global_batch=planner.global_batch,
        room=usable(context.hardware),
        plans=plans,
        best=best,
        refused=refused,
        candidates=candidates,
    )


def _kind(strategy: Strategy, several: bool) -> str:
    """The kind of a strategy, with its precision if several are searched."""
    return f"{kind_of(strategy)},{strategy.precision}" if several else kind_of(strategy)


def _named(
    planner: Planner, cluster: Cluster, strategies: tuple[str, ...]
) -> tuple[dict[str, Plan], tuple[Refusal, ...], int]:
    """The plans of named strategies by name, fastest first, and why the others have none."""
    plans: dict[str, Plan] = {}
    refused: list[Refusal] = []
    for text in strategies:
        found = planner.search_named(cluster, [Strategy.parse(text)])
        if found.plans:
            plans[text] = found.plans[0]
        refused += [Refusal(strategy=text, reason=refusal.reason) for refusal in found.refused]
    by_speed = sorted(plans.items(), key=lambda item: item[1].forecast.step)
    return dict(by_speed), tuple(refused), len(strategies)
