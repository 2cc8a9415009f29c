"""The planner put together: jobs are described and traced here, and the planner is handed what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from meshwright.described import described
from meshwright.errors import BadInput, MeshwrightError
from meshwright.exchange import Imported
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import LOCAL, Cluster
from meshwright.facts.costs import ModelCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.account import usable
from meshwright.planner.arrangement import cut_batch
from meshwright.planner.calibrate import Calibration
from meshwright.planner.candidates import Allowed, candidates
from meshwright.planner.explain import advise
from meshwright.planner.search import Found, Setting, search, with_traces
from meshwright.planner.stagewise import Loads
from meshwright.runtime.probe_machine import local_cluster
from meshwright.strategies.pipeline import pipeline_ranks
from meshwright.tracing.costs import measure_costs

PATIENCE = 10.0
"""Seconds for tracing finalists: as many as fit in, going by the one before, and the first in any case."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user asks of a ranking."""

    allowed: Allowed = field(default_factory=Allowed)
    strategies: tuple[str, ...] = ()
    """Only these, instead of all that are allowed."""
    fast: bool = False
    """Whether to leave the finalists untraced."""
    finalists: int = 3
    listed: int = 10
    global_batch: int | None = None
    """Instead of the job's own."""
    calibration: Calibration | None = None
    """Factors that were fitted to the user's own runs."""
    against: Imported | None = None
    """A choice that was not ours, to be held against the plans."""

    @property
    def fitted(self) -> tuple[str, ...]:
        return self.calibration.sentences() if self.calibration else ()


def open_planner(job: str, wishes: Wishes) -> Planner:
    """A planner for a job as it is written on the command line."""
    known = described(job)
    batch = wishes.global_batch or known.job.global_batch
    return Planner(known.job, known.facts, batch, wishes.calibration, known.costs)


def read_cluster(text: str) -> Cluster:
    """The cluster that a text names, this machine looked at where it says `local`."""
    cluster = Cluster.parse(text)
    return local_cluster() if cluster.device == LOCAL else cluster


def read_allowed(
    *, precision: str, recompute: str, offload: str, compile: bool, tensor: bool, pipeline: bool
) -> Allowed:
    """What the command line's words allow; an unknown one is an error that names the known ones."""
    left = _words("offload", offload, ("none", "optimizer", "params"))
    return Allowed(
        precisions=_words("precision", precision, ("fp32", "bf16", "fp16")),
        recompute=_words("ac", recompute, ("none", "selective", "full")),
        offload=tuple("" if word == "none" else word for word in left),
        compile=(False, True) if compile else (False,),
        tensor=tensor,
        pipeline=pipeline,
    )


def _words(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    unknown = next((word for word in words if word not in known), None)
    if unknown is not None or not words:
        raise BadInput(f"--{option} {text!r}: {unknown!r} is not one of {', '.join(known)}; join several with commas.")
    return words


class Planner:
    """One described job, planned for as many clusters and wishes as one likes."""

    def __init__(
        self,
        job: Job,
        facts: ModelFacts,
        global_batch: int,
        calibration: Calibration | None = None,
        costs: dict[tuple[str, str], ModelCosts] | None = None,
    ) -> None:
        """`costs` are those that were traced before, by precision and recomputing; what is traced now is added."""
        self.job, self.facts, self.global_batch = job, facts, global_batch
        self._calibration = calibration or Calibration()
        self.notes: list[str] = []
        """What a user should know of how plans were made."""
        self._costs = {} if costs is None else costs
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
                calibration=self._calibration,
            )
        return self._settings[cluster]

    def search(self, cluster: Cluster, wishes: Wishes) -> Found:
        """Think through all that is allowed, or just what is named."""
        if wishes.strategies:
            return self.search_named(cluster, [Strategy.parse(text) for text in wishes.strategies])
        for precision, recompute in product(wishes.allowed.precisions, wishes.allowed.recompute):
            self._measure(precision, recompute)
        return search(self.setting(cluster), candidates(self.facts, cluster, self.global_batch, wishes.allowed))

    def search_named(self, cluster: Cluster, strategies: Sequence[Strategy]) -> Found:
        """Think through these and no others."""
        for strategy in strategies:
            self._measure(strategy.precision, strategy.recompute)
        return search(self.setting(cluster), strategies, time_all=True)

    def _measure(self, precision: str, recompute: str) -> None:
        """Costs under a policy; each precision is traced once."""
        if (precision, "none") not in self._costs:
            self._costs[precision, "none"] = measure_costs(self.job, self.facts, precision)
        self._costs.setdefault((precision, recompute), self._costs[precision, "none"].recomputed(recompute))

    def trace_first(self, cluster: Cluster, plans: list[Plan], count: int) -> list[Plan]:
        """The first plans with their memory traced; one that turns out not to fit gives way to the next."""
        from meshwright.tracing import trace_roles  # a plan without traces need not wait for all that it imports

        setting, rest = self.setting(cluster), list(plans)
        traced: list[Plan] = []
        started = last = time.perf_counter()
        while rest and len(traced) < count and (now := time.perf_counter()) + (now - last) <= started + PATIENCE:
            plan, last = rest.pop(0), now
            try:
                traces = trace_roles(self._short(plan.strategy), self.facts, plan.strategy, cluster.devices)
            except MeshwrightError as error:
                self.notes.append(f"{plan.strategy} could not be traced, and stays an account: {error}")
                traced.append(plan)
                continue
            checked = with_traces(setting, plan, traces)
            if checked.fits:
                traced.append(checked)
        return [*traced, *rest]

    def _short(self, strategy: Strategy) -> Job:
        """The job with a batch that is just enough to fill the strategy: more of the same takes no more memory."""
        size, count = cut_batch(strategy, self.global_batch)
        enough = min(count, pipeline_ranks(strategy) + 1)
        return replace(self.job, global_batch=size * enough * strategy.data_ranks)

    def advise(self, cluster: Cluster, wishes: Wishes, found: Found) -> tuple[str, ...]:
        """What would make it fit."""
        tightest = min(found.unfit, key=lambda plan: plan.forecast.peak, default=None)
        offloaded = {"recompute": ("full",), "offload": ("optimizer",)}
        tries: list[tuple[str, Callable[[], Plan | None]]] = [
            ("Recomputing all activations (--ac full)", partial(self._first, cluster, wishes, recompute=("full",))),
            ("Offloading the optimizer (--offload optimizer)", partial(self._first, cluster, wishes, **offloaded)),
        ]
        for times in (2, 4, 8):
            larger = replace(cluster, nodes=cluster.nodes * times)
            tries.append((f"{times} times the nodes", partial(self._first, larger, wishes)))
        return advise(tightest, usable(self.setting(cluster).hardware), tries)

    def _first(self, cluster: Cluster, wishes: Wishes, **changes: Any) -> Plan | None:
        wider = replace(wishes, strategies=(), allowed=replace(wishes.allowed, **changes))
        plans = self.search(cluster, wider).plans
        return plans[0] if plans else None


def named_strategies(words: Sequence[str]) -> tuple[str, ...]:
    """Strategies as they were written, each checked."""
    return tuple(str(Strategy.parse(word)) for word in words)
