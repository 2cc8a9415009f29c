"""Set up a job under the named strategy, or under the one that the planner chooses for `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.api.job_planner import PlanOptions
from meshwright.api.plan import plan
from meshwright.assemble.check import refuse_unbuilt
from meshwright.assemble.world import World
from meshwright.environment import launched
from meshwright.errors import Refused
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.candidates import Allowed
from meshwright.probe.machine import local_cluster
from meshwright.runtime import run
from meshwright.runtime.run import Run


def choose_strategy(job: Job, wanted: Strategy, cluster: Cluster) -> Plan:
    """The plan for `auto`: the planner chooses the axes, and any policy that `wanted` leaves open."""
    refuse_unbuilt(replace(wanted, auto=False))
    allowed = Allowed(
        precisions=(wanted.precision,),
        recompute=(wanted.recompute,) if wanted.recompute != "none" else ("none", "selective", "full"),
        offload=(wanted.offload,) if wanted.offload else ("", "optimizer"),
        compile=(wanted.compile,),
        graphs=(wanted.graphs,),
        loss=("whole", "pieced") if wanted.loss == "whole" else (wanted.loss,),
    )
    ranking = plan(job, cluster, PlanOptions(allowed=allowed, fast=True))
    if not ranking.plans:
        raise Refused(" ".join(ranking.advice))
    return ranking.plans[0]


def resolve_auto(
    job: Job, strategy: Strategy | str, *, ranks: int | None = None, device: str | None = None, nodes: int = 1
) -> Strategy:
    """The strategy as written, or the planner's choice if it says `auto`.

    The choice is made for `ranks` ranks on each of `nodes` machines like this one, or for the launcher's; every rank
    makes the same choice.
    """
    wanted = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    if not wanted.auto:
        return wanted
    place = launched()
    here = local_cluster(device, devices=place.local_ranks if place else ranks)
    cluster = replace(here, nodes=place.ranks // place.local_ranks if place else nodes)
    return choose_strategy(job, wanted, cluster).strategy


def setup(
    job: Job,
    strategy: Strategy | str = "ddp",
    *,
    seed: int = 0,
    device: str | None = None,
    workers: int = 0,
    facts: ModelFacts | None = None,
    world: World | None = None,
    deepspeed_config: Mapping[str, Any] | None = None,
) -> Run:
    """Set up a job under a strategy on the ranks that this process was launched with, or on this process alone.

    `auto` chooses the fastest strategy here. `deepspeed_config` is the content of DeepSpeed's JSON file.
    """
    return run.setup(
        job,
        resolve_auto(job, strategy, ranks=1, device=device),
        seed=seed,
        device=device,
        workers=workers,
        facts=facts,
        world=world,
        deepspeed_config=deepspeed_config,
    )
