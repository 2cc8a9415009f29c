"""Every strategy worth thinking of: all ways to lay a job over a cluster's devices, under the policies one allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod

from meshwright.facts.cluster import Cluster
from meshwright.facts.data_axis import usual_terms
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import MODEL_AXES, conflict
from meshwright.facts.strategy import AxisTerm, Strategy
from meshwright.schedules import FAMILIES
from meshwright.strategies import model_axis


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What the user lets the planner choose between."""

    precisions: tuple[str, ...] = ("bf16",)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    offload: tuple[str, ...] = ("", "optimizer")
    compile: tuple[bool, ...] = (False,)
    tensor: bool = True
    """Whether inner axes are searched: those whose ranks run the same layers together."""
    pipeline: bool = True
    """Whether axes that cut the model into stages are searched."""
    largest_tensor: int | None = None
    """The most ranks of an inner axis; None: as many as the axis itself proposes."""
    schedules: tuple[str, ...] = tuple(name for name, family in FAMILIES.items() if family.searched)


def candidates(facts: ModelFacts, cluster: Cluster, global_batch: int, allowed: Allowed) -> Iterator[Strategy]:
    """Resolved strategies, the plainest first. Not all of them can be: that is for `refuse` to say."""
    for terms in _model_axes(facts, cluster, allowed):
        inner = prod(term.size for term in terms)
        data = cluster.devices // inner
        if data > global_batch:
            continue
        for axis in _data_axes(data, inner, cluster):
            for model_axes in product(*(_with_suffixes(term, allowed) for term in terms)):
                shape = ",".join(filter(None, [axis, *map(str, model_axes)]))
                yield from _with_policies(shape or "single", global_batch // data, allowed)


def _model_axes(facts: ModelFacts, cluster: Cluster, allowed: Allowed) -> list[tuple[AxisTerm, ...]]:
    """The ways to divide the model, the fewest ranks first."""
    sizes = [_sizes(word, facts, cluster, allowed) for word in MODEL_AXES]
    found = [chosen for chosen in product(*sizes) if cluster.devices % prod(chosen) == 0]
    found.sort(key=lambda chosen: (prod(chosen), chosen))
    terms = [tuple(AxisTerm(word, n) for word, n in zip(MODEL_AXES, chosen, strict=True) if n > 1) for chosen in found]
    return [own for own in terms if not any(conflict(a.traits, b.traits) for a, b in combinations(own, 2))]


def _sizes(word: str, facts: ModelFacts, cluster: Cluster, allowed: Allowed) -> list[int]:
    term = AxisTerm(word, 1)
    staged = term.traits.staged
    if not (allowed.pipeline if staged else allowed.tensor):
        return [1]
    most = cluster.devices if staged or allowed.largest_tensor is None else allowed.largest_tensor
    proposed = model_axis(term).sizes(facts, cluster)
    return [n for n in _divisors(cluster.devices) if n == 1 or (n in proposed and n <= most)]


def _with_suffixes(term: AxisTerm, allowed: Allowed) -> list[AxisTerm]:
    """A pipeline under each schedule that is allowed; any other axis as it is."""
    if not term.traits.staged or not term.traits.suffixes:
        return [term]
    return [replace(term, suffix=name) for name in term.traits.suffixes if name in allowed.schedules]


def _data_axes(ranks: int, inner: int, cluster: Cluster) -> list[str]:
    """The ways to lay so many data ranks; hybrids shard within a node or a few of them, and replicate beyond."""
    if ranks == 1:
        return [""]
    shards = [n for n in _divisors(ranks) if 1 < n < ranks and n * inner >= cluster.devices_per_node]
    hybrids = [f"{ranks // n}x{n}" for n in shards[:3]] if cluster.nodes > 1 else []
    return list(usual_terms(lambda traits: traits.planned, hybrids))


def _with_policies(shape: str, samples: int, allowed: Allowed) -> Iterator[Strategy]:
    strategy = Strategy.parse(shape)
    sizes = [size for size in _divisors(samples) if size & (size - 1) == 0 or size == samples]
    if strategy.stage_axis:
        sizes = [size for size in sizes if size * strategy.stage_ranks <= samples]  # else the pipeline is never full
    for precision, recompute, offload, compiled in product(
        allowed.precisions, allowed.recompute, allowed.offload, allowed.compile
    ):
        if compiled and strategy.axes:
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
    axes = strategy.traits.complexity + sum(term.traits.complexity for term in strategy.axes)
    schedule = FAMILIES[strategy.schedule].complexity if strategy.schedule else 0
    policies = 2 * (strategy.recompute != "none") + 4 * bool(strategy.offload) + 3 * strategy.compile
    return axes + schedule + policies
