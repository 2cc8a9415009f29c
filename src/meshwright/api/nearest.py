"""The strategy nearest to another one that fits a different number of ranks: for runs that lose or gain nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.assemble.check import check
from meshwright.errors import BadInput, Refused
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm
from meshwright.facts.strategy import Strategy
from meshwright.planner.candidates import Allowed
from meshwright.probe.machine import local_cluster
from meshwright.runtime.place import choose_device, place_for

POLICIES = ("precision", "pure", "autocast", "recompute", "offload", "nvme", "reduce", "loss", "compile", "graphs")
"""Kept as they are, with the engine: they are the training, or the user's own choice."""


def nearest_strategy(
    job: Job, facts: ModelFacts, wanted: Strategy, *, ranks: int, per_node: int, device: str | None = None
) -> Strategy:
    """`wanted` itself if it runs on so many ranks; else the planner's strategy that shares most of its axes.

    The global batch is the job's, so the training stays the same. Refused if no strategy with these policies fits.
    """
    place = place_for(choose_device(device), ranks, local_ranks=per_node)
    cluster = replace(local_cluster(device, devices=per_node), nodes=ranks // per_node)
    for candidate in (wanted, *_ranked(job, facts, wanted, cluster)):
        try:
            check(job, facts, candidate, place)
        except BadInput:
            continue
        return candidate
    raise Refused(f"No strategy with the policies of {wanted} fits {ranks} ranks; the run needs its nodes back.")


def distance(one: Strategy, other: Strategy) -> tuple[int, bool, int, float]:
    """How far two strategies are apart: axes that only one has, state divided differently, variants, sizes."""
    terms, others = _terms(one), _terms(other)
    both = terms.keys() & others.keys()
    variants = (one.variant != other.variant) + sum(terms[name].schedule != others[name].schedule for name in both)
    apart = sum(abs(math.log2(terms[name].size / others[name].size)) for name in both)
    return len(terms.keys() ^ others.keys()), one.traits.shards != other.traits.shards, variants, apart


def _ranked(job: Job, facts: ModelFacts, wanted: Strategy, cluster: Cluster) -> Iterator[Strategy]:
    """The planner's strategies that fit, the nearest first, and of equally near ones the fastest."""
    allowed = Allowed(
        precisions=(wanted.precision,),
        recompute=(wanted.recompute,),
        offload=(wanted.offload,),
        compile=(wanted.compile,),
        graphs=(wanted.graphs,),
        loss=(wanted.loss,),
    )
    found = Planner(job, facts, job.global_batch).search(cluster, PlanOptions(allowed=allowed))
    kept = {name: getattr(wanted, name) for name in (*POLICIES, "engine")}
    for plan in sorted((plan for plan in found.plans if plan.fits), key=lambda plan: distance(wanted, plan.strategy)):
        yield replace(plan.strategy, **kept, micro_batch=None)


def _terms(strategy: Strategy) -> dict[str, AxisTerm]:
    return {term.traits.mesh_name: term for term in strategy.axes if term.size > 1}
