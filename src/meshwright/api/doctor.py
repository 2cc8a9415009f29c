"""What to do after a rank ran out of memory: where the memory went, and the nearest strategy that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.api.neighbours import changes, plain_size
from meshwright.assemble.check import check
from meshwright.errors import BadInput, MeshwrightError
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.memory_report import MemoryReport
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.account import CONTEXT, MARGIN, usable
from meshwright.planner.candidates import Allowed
from meshwright.planner.search import ROOM
from meshwright.probe.machine import local_cluster
from meshwright.runtime.place import choose_device, place_for
from meshwright.strategies import Place
from meshwright.units import GIB, show_bytes, show_seconds

CPU_ROOM = 0.75
"""Share of its room that a forecast may take on a CPU. Ranks of tests/oom_job.py took 1.05 (ddp) to 1.23 (zero2) times
their forecast: gloo has its own buffers, and memory that is freed in small pieces stays with the process."""
TRACED = 4
"""Strategies whose step is traced, the nearest first, until one fits."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The forecast of a run that ran out of memory, and the nearest strategy that fits."""

    failed: Plan
    scale: float
    """How much more memory the run took than its forecast; 1 if the forecast said that it needs as much."""
    advised: Plan | None
    device: str
    advice: tuple[str, ...] = ()
    """What else to change, if no strategy fits."""

    def sentences(self) -> str:
        memory = self.failed.forecast.memory
        counted = {cause: size for cause, size in memory.items() if self.device != "cpu" or cause != "allocator"}
        causes = ", ".join(f"{cause} {show_bytes(size)}" for cause, size in counted.items() if size)
        lines = [f"The forecast of {self.failed.strategy} is {show_bytes(sum(counted.values()))}: {causes}."]
        if self.scale > 1:
            lines.append(
                f"The run took at least {self.scale:.2f} times as much, so forecasts below are scaled by that."
            )
        if self.advised is None:
            return "\n".join([*lines, "No strategy with this precision fits these ranks.", *self.advice])
        peak = show_bytes(_bytes(self.advised, self.device) * self.scale)
        return "\n".join(
            [*lines, f"The nearest strategy that fits is {self.advised.strategy}: {peak}, {self._price()}."]
        )

    def _price(self) -> str:
        assert self.advised is not None
        before, after = self.failed.forecast.step, self.advised.forecast.step
        share = after / before - 1
        if abs(share) < 0.01:
            return f"at the same speed ({show_seconds(after)} per step by forecast)"
        return f"{abs(share):.0%} {'more' if share > 0 else 'less'} time per step by forecast ({show_seconds(after)})"


def diagnose(
    job: Job,
    facts: ModelFacts,
    strategy: Strategy,
    report: MemoryReport | None,
    *,
    ranks: int,
    nodes: int = 1,
    device: str | None = None,
    saves: bool = False,
) -> Diagnosis:
    """Find the nearest strategy for the same job on the same ranks that fits what the report says is there.

    `saves`: the run saves in the background, which takes a copy in host memory. Without a report, a rank has its share
    of the machine.
    """
    kind, per_node = choose_device(device), ranks // nodes
    cluster = replace(local_cluster(kind, devices=per_node), nodes=nodes)
    if report is not None:
        cluster = _with_room(cluster, report.room)
    planner = Planner(job, facts, job.global_batch)
    failed = _forecast(planner, cluster, strategy)
    scale = max(1.0, report.needed / _bytes(failed, kind)) if report is not None and failed.peak else 1.0
    room = (CPU_ROOM if kind == "cpu" else ROOM) * usable(planner.context(cluster).hardware)

    def fits(plan: Plan) -> bool:
        saving = plan.saving_gib * GIB if saves and kind == "cpu" else 0.0
        return _bytes(plan, kind) * scale + saving <= room

    place = place_for(kind, ranks, local_ranks=per_node)
    tries = 0
    for plan in _nearest_first(planner, cluster, strategy, ranks):
        if tries == TRACED:
            break
        if not fits(plan) or not _runs(job, facts, plan.strategy, place):
            continue
        tries += 1
        traced = planner.traced(cluster, plan)
        if fits(traced):
            return Diagnosis(failed=failed, scale=scale, advised=traced, device=kind)
    more: tuple[str, ...] = ("Use more ranks, or give each more memory.",)
    if kind != "cpu":
        options = PlanOptions(allowed=_allowed(strategy, kind))
        more = planner.advise(cluster, options, planner.search(cluster, options))
    return Diagnosis(failed=failed, scale=scale, advised=None, advice=more, device=kind)


def _bytes(plan: Plan, device: str) -> int:
    """What a rank needs. Only a GPU's allocator keeps what tensors have returned."""
    return plan.peak if device == "cpu" else plan.forecast.peak


def _with_room(cluster: Cluster, room: int) -> Cluster:
    """The cluster with devices of which training may use exactly this much."""
    memory = room if cluster.device == "cpu" else round((room + CONTEXT) / (1 - MARGIN))
    hardware = {**(cluster.hardware or {}), "memory": memory}
    return replace(cluster, memory_gib=memory / GIB, hardware=hardware)


def _forecast(planner: Planner, cluster: Cluster, strategy: Strategy) -> Plan:
    """The failed strategy's own forecast, traced if that works."""
    found = planner.search_named(cluster, [strategy])
    plans = [*found.plans, *found.unfit]
    if not plans:
        raise BadInput(found.refused[0].reason)
    return planner.traced(cluster, plans[0])


def _nearest_first(planner: Planner, cluster: Cluster, wanted: Strategy, ranks: int) -> Iterator[Plan]:
    """Plans by the number of changed terms; of equally near ones, the fastest first."""
    found = planner.search(cluster, PlanOptions(allowed=_allowed(wanted, cluster.device)))
    own = wanted.resolve(ranks)
    plans = [replace(plan, strategy=_kept(plan.strategy, own, planner.global_batch)) for plan in found.plans]
    others = [plan for plan in plans if plan.strategy != own]
    yield from sorted(others, key=lambda plan: (changes(own, plan.strategy), plan.forecast.step))


def _kept(found: Strategy, own: Strategy, global_batch: int) -> Strategy:
    """A planner's strategy with what only the user chooses, and without a micro-batch that is the whole batch."""
    kept = replace(found, pure=own.pure, reduce=own.reduce, engine=own.engine)
    return plain_size(kept, global_batch)


def _allowed(wanted: Strategy, device: str) -> Allowed:
    return Allowed(
        precisions=(wanted.precision,),
        # On a CPU the optimizer is in host memory anyway.
        offload=(wanted.offload,) if wanted.offload or device == "cpu" else ("", "optimizer"),
        compile=(wanted.compile,),
        graphs=(wanted.graphs,),
    )


def _runs(job: Job, facts: ModelFacts, strategy: Strategy, place: Place) -> bool:
    try:
        check(job, facts, strategy, place)
    except MeshwrightError:
        return False
    return True
