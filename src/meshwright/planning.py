"""The planner put together: jobs are described and traced here, and the planner is handed what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from meshwright.describe.decoder import Shape, decoder_job
from meshwright.describe.decoder_losses import fused_loss_job, shifted_loss_job
from meshwright.describe.model import describe
from meshwright.errors import MeshwrightError, Refused
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import ModelCosts
from meshwright.facts.hardware import Hardware
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan, Ranking
from meshwright.facts.strategy import Strategy
from meshwright.planner.account import GIB, account, usable
from meshwright.planner.candidates import Allowed, candidates
from meshwright.planner.explain import advise, explain
from meshwright.planner.rows import Row, read_rows
from meshwright.planner.scores import Outcome
from meshwright.planner.search import Found, Setting, best_of_each_kind, choose, search, with_traces
from meshwright.planner.stagewise import Loads
from meshwright.tracing.costs import measure_costs
from meshwright.tracing.step import trace_roles

Progress = Callable[[int, int], None]
"""Told how many of how many are done."""


def validate_rows(path: Path, progress: Progress = lambda done, total: None) -> list[Outcome]:
    """What the planner says of every measured run in a CSV file."""
    rows = read_rows(path)
    shapes = _Shapes()
    outcomes = []
    for row in rows:
        outcomes.append(_outcome(row, shapes))
        progress(len(outcomes), len(rows))
    return outcomes


def _outcome(row: Row, shapes: _Shapes) -> Outcome:
    hardware = hardware_of(row.cluster)
    try:
        found = account(row.arrangement, shapes.loads(row, hardware), hardware, row.cluster.devices_per_node)
    except Refused as error:
        return Outcome(row=row, account=None, fits=False, reason=str(error))
    fits = found.fits(hardware)
    reason = "" if fits else f"{found.reserved / GIB:.1f} of {usable(hardware) / GIB:.1f} GiB"
    return Outcome(row=row, account=found, fits=fits, reason=reason)


class _Shapes:
    """Decoders by shape, each described and traced once."""

    def __init__(self) -> None:
        self._facts: dict[tuple[Shape, str], tuple[Job, ModelFacts, dict[tuple[str, str], ModelCosts]]] = {}
        self._loads: dict[object, Loads] = {}

    def loads(self, row: Row, hardware: Hardware) -> Loads:
        key = (row.shape, row.loss)
        if key not in self._facts:
            job = _JOBS[row.loss](row.shape)
            self._facts[key] = job, describe(job), {}
        job, facts, costs = self._facts[key]
        policy = row.arrangement.precision, row.arrangement.recompute
        if policy not in costs:
            costs[policy] = self._plain(key, policy[0]).recomputed(policy[1])
        place = (key, row.cluster)
        if place not in self._loads:
            self._loads[place] = Loads(facts, costs, hardware, by_compute=True)
        return self._loads[place]


    def _plain(self, key: tuple[Shape, str], precision: str) -> ModelCosts:
        job, facts, costs = self._facts[key]
        if (precision, "none") not in costs:
            costs[precision, "none"] = measure_costs(job, facts, precision)
        return costs[precision, "none"]


_JOBS: dict[str, Callable[[Shape], Job]] = {
    "plain": lambda shape: decoder_job(shape, global_batch=1),
    "shifted": lambda shape: shifted_loss_job(shape, global_batch=1),
    "fused": lambda shape: fused_loss_job(shape, global_batch=1),
}


def unexplained(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Runs that failed though by our account they fit: not for memory, or we are wrong."""
    return [outcome for outcome in outcomes if not outcome.row.fits and outcome.fits]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user asks of a ranking."""

    allowed: Allowed = field(default_factory=Allowed)
    strategies: tuple[str, ...] = ()
    """Only these, instead of all that are allowed."""
    fast: bool = False
    """Whether to leave the finalists untraced."""
    finalists: int = 3
    listed: int = 12
    global_batch: int | None = None
    """Instead of the job's own."""


def plan(job: Job, cluster: Cluster, wishes: Wishes | None = None, *, name: str = "job") -> Ranking:
    """All strategies for a job on a cluster, ranked; the finalists traced unless that is not wished."""
    wishes = wishes or Wishes()
    started = time.perf_counter()
    batch = wishes.global_batch or job.global_batch
    facts = describe(job)
    planner = Planner(job, facts, batch)
    found = planner.search(cluster, wishes)
    plans = choose(best_of_each_kind(found.plans))
    if not wishes.fast:
        plans = planner.trace_first(cluster, plans, wishes.finalists)
    return Ranking(
        job=name,
        cluster=str(cluster),
        plans=tuple(explain(plans[: wishes.listed])),
        refused=tuple(found.refused),
        candidates=found.candidates,
        seconds=time.perf_counter() - started,
        advice=() if plans else planner.advise(cluster, wishes, found),
    )


class Planner:
    """One described job, planned for as many clusters and wishes as one likes."""

    def __init__(self, job: Job, facts: ModelFacts, global_batch: int) -> None:
        self.job, self.facts, self.global_batch = job, facts, global_batch
        self._costs: dict[tuple[str, str], ModelCosts] = {}
        self._settings: dict[Cluster, Setting] = {}

    def setting(self, cluster: Cluster) -> Setting:
        if cluster not in self._settings:
            hardware = hardware_of(cluster)
            self._settings[cluster] = Setting(
                facts=self.facts,
                loads=Loads(self.facts, self._costs, hardware),
                cluster=cluster,
                hardware=hardware,
                global_batch=self.global_batch,
            )
        return self._settings[cluster]

    def measure(self, allowed: Allowed) -> None:
        """Costs of every policy that is allowed, each traced once."""
        for precision, recompute in product(allowed.precisions, dict.fromkeys(("none", *allowed.recompute))):
            if (precision, "none") not in self._costs:
                self._costs[precision, "none"] = measure_costs(self.job, self.facts, precision)
            plain = self._costs[precision, "none"]
            self._costs.setdefault((precision, recompute), plain.recomputed(recompute))

    def search(self, cluster: Cluster, wishes: Wishes) -> Found:
        if wishes.strategies:
            chosen = [Strategy.parse(text) for text in wishes.strategies]
            policies = Allowed(
                precisions=tuple(dict.fromkeys(s.precision for s in chosen)),
                recompute=tuple(dict.fromkeys(s.recompute for s in chosen)),
            )
            self.measure(policies)
            return search(self.setting(cluster), chosen)
        self.measure(wishes.allowed)
        return search(self.setting(cluster), candidates(self.facts, cluster, self.global_batch, wishes.allowed))

    def trace_first(self, cluster: Cluster, plans: list[Plan], count: int) -> list[Plan]:
        """The first plans with their memory traced; one that turns out not to fit gives way to the next."""
        setting, traced, rest = self.setting(cluster), [], list(plans)
        while rest and len(traced) < count:
            plan = rest.pop(0)
            try:
                traces = trace_roles(self.job, self.facts, plan.strategy, cluster.devices)
            except MeshwrightError:
                traced.append(plan)  # it stays an account
                continue
            checked = with_traces(setting, plan, traces)
            if checked.fits:
                traced.append(checked)
        return [*traced, *rest]

    def advise(self, cluster: Cluster, wishes: Wishes, found: Found) -> tuple[str, ...]:
        tightest = min(found.unfit, key=lambda plan: plan.forecast.peak, default=None)
        room = usable(self.setting(cluster).hardware)
        return advise(tightest, room, [
            ("Recomputing all activations (--ac full)", lambda: self._first(cluster, wishes, recompute=("full",))),
            ("Offloading the optimizer (--offload optimizer)", lambda: self._first(cluster, wishes, recompute=("full",), offload=("optimizer",))),
            *((f"{times} times the nodes", partial(self._first, replace(cluster, nodes=cluster.nodes * times), wishes)) for times in (2, 4, 8)),
        ])

    def _first(self, cluster: Cluster, wishes: Wishes, **changes: Any) -> Plan | None:
        wider = replace(wishes, strategies=(), allowed=replace(wishes.allowed, **changes))
        plans = self.search(cluster, wider).plans
        return plans[0] if plans else None
