"""Every strategy worth thinking of: all ways to lay a job over a cluster's devices, under the policies one allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from meshwright.facts.cluster import Cluster
from meshwright.facts.data_axis import usual_terms
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy

SCHEDULES = ("1f1b", "interleaved", "zbv")
"""Those that are searched; `gpipe` holds more than `1f1b` and is no faster, and `zb` is between `1f1b` and `zbv`."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What the user lets the planner choose between."""

    precisions: tuple[str, ...] = ("bf16",)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    offload: tuple[str, ...] = ("", "optimizer")
    compile: tuple[bool, ...] = (False,)
    tensor: bool = True
    pipeline: bool = True
    largest_tensor: int | None = None
    """Ranks of a tensor axis; None: as many as a node has devices."""
    schedules: tuple[str, ...] = SCHEDULES


def candidates(facts: ModelFacts, cluster: Cluster, global_batch: int, allowed: Allowed) -> Iterator[Strategy]:
    """Resolved strategies, the plainest first. Not all of them can be: that is for `refuse` to say."""
    for tp, pp in _model_axes(facts, cluster, allowed):
        data = cluster.devices // (tp * pp)
        if data > global_batch:
            continue
        for axis in _data_axes(data, tp * pp, cluster):
            for schedule in allowed.schedules if pp > 1 else ("",):
                shape = f"{axis}{f',tp={tp}' if tp > 1 else ''}{f',pp={pp}:{schedule}' if pp > 1 else ''}".strip(",")
                yield from _with_policies(shape or "single", global_batch // data, pp, allowed)


def _model_axes(facts: ModelFacts, cluster: Cluster, allowed: Allowed) -> list[tuple[int, int]]:
    widest = allowed.largest_tensor or cluster.devices_per_node
    tensors = [n for n in _divisors(cluster.devices) if n <= widest] if allowed.tensor else [1]
    pipelines = [n for n in _divisors(cluster.devices) if n <= max(1, len(facts.blocks))] if allowed.pipeline else [1]
    found = [(tp, pp) for tp, pp in product(tensors, pipelines) if cluster.devices % (tp * pp) == 0]
    return sorted(found, key=lambda axes: (axes[0] * axes[1], axes))


def _data_axes(ranks: int, inner: int, cluster: Cluster) -> list[str]:
    """The ways to lay so many data ranks; hybrids shard within a node or a few of them, and replicate beyond."""
    if ranks == 1:
        return [""]
    shards = [n for n in _divisors(ranks) if 1 < n < ranks and n * inner >= cluster.devices_per_node]
    hybrids = [f"{ranks // n}x{n}" for n in shards[:3]] if cluster.nodes > 1 else []
    return list(usual_terms(lambda traits: traits.planned, hybrids))


def _with_policies(shape: str, samples: int, pp: int, allowed: Allowed) -> Iterator[Strategy]:
    strategy = Strategy.parse(shape)
    sizes = [size for size in _divisors(samples) if size & (size - 1) == 0 or size == samples]
    if pp > 1:
        sizes = [size for size in sizes if size * pp <= samples]  # else the pipeline is never full
    for precision, recompute, offload, compiled in product(
        allowed.precisions, allowed.recompute, allowed.offload, allowed.compile
    ):
        if compiled and (strategy.tp > 1 or pp > 1):
            continue
        if offload and recompute != allowed.recompute[-1]:
            continue  # what still does not fit when it recomputes all it may is worth the host's bandwidth
        made = replace(strategy, precision=precision, recompute=recompute, offload=offload, compile=compiled)  # type: ignore[arg-type]
        for size in sizes:
            yield replace(made, micro_batch=size)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def plainness(strategy: Strategy) -> int:
    """How much there is to a strategy: of two that are as fast, the plainer is the better choice."""
    axes = 10 * (strategy.tp > 1) + 12 * (strategy.pp > 1) + strategy.traits.complexity
    schedules = 0 if strategy.schedule in ("", "1f1b", "gpipe") else 2
    policies = 2 * (strategy.recompute != "none") + 4 * bool(strategy.offload) + 3 * strategy.compile
    return axes + schedules + policies
