"""Enumerate candidate strategies: all ways to divide a job over a cluster's devices under the allowed policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf, prod
from typing import Any

from meshwright.facts.cluster import Cluster
from meshwright.facts.data_axis import usual_terms
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import MODEL_AXES, conflict
from meshwright.facts.strategy import AxisTerm, Strategy, divisors
from meshwright.schedules import FAMILIES
from meshwright.strategies import data_strategy, model_axis

ENOUGH_TOKENS = 131072
"""Tokens of a rank's micro-batch from which no larger one is tried. Products are as fast as they get with far fewer,
and gathering a block's parameters for so many tokens takes less time than computing them, even between nodes."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What the user allows the planner to choose from."""

    precisions: tuple[str, ...] = ("bf16",)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    offload: tuple[str, ...] = ("", "optimizer")
    compile: tuple[bool, ...] = (False,)
    graphs: tuple[bool, ...] = (False,)
    loss: tuple[str, ...] = ("whole", "pieced")
    """A pieced loss is tried where the logits of a whole one take much of a device's memory."""
    tensor: bool = True
    """Whether to search inner axes, whose ranks run the same layers together."""
    pipeline: bool = True
    """Whether to search axes that cut the model into stages."""
    largest_tensor: int | None = None
    """Largest size of an inner axis; None: what the axis proposes."""
    schedules: tuple[str, ...] = tuple(name for name, family in FAMILIES.items() if family.searched)


def candidates(facts: ModelFacts, cluster: Cluster, global_batch: int, allowed: Allowed) -> Iterator[Strategy]:
    """Yield candidates, smallest model axes first. Some cannot run: `refuse` in `planner/search.py` decides that."""
    for terms in _model_axes(facts, cluster, allowed):
        inner = prod(term.size for term in terms)
        data = cluster.devices // inner
        splits = prod(term.size for term in terms if term.traits.splits_batch)
        if data * splits > global_batch:
            continue
        summed = any(term.traits.shares_gradients for term in terms)
        enough = _enough_samples(facts, terms)
        for axis in _data_axes(data, inner, cluster, splits, summed=summed):
            for model_axes in product(*(_with_suffixes(term, allowed) for term in terms)):
                shape = ",".join(filter(None, [axis, *map(str, model_axes)]))
                yield from _with_policies(shape or "single", global_batch // (data * splits), allowed, enough)


def _enough_samples(facts: ModelFacts, terms: tuple[AxisTerm, ...]) -> float:
    """Samples of a micro-batch from which no larger one is tried."""
    own = min(facts.tokens, default=0) / prod(term.size for term in terms if term.traits.shares_gradients)
    return ENOUGH_TOKENS / own if own else inf


def _model_axes(facts: ModelFacts, cluster: Cluster, allowed: Allowed) -> list[tuple[AxisTerm, ...]]:
    """All combinations of model axes, fewest ranks first."""
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
    return [n for n in divisors(cluster.devices) if n == 1 or (n in proposed and n <= most)]


def _with_suffixes(term: AxisTerm, allowed: Allowed) -> list[AxisTerm]:
    """A pipeline with each allowed schedule; any other axis unchanged."""
    if not term.traits.staged or not term.traits.suffixes:
        return [term]
    return [replace(term, suffix=name) for name in term.traits.suffixes if name in allowed.schedules]


def _data_axes(ranks: int, inner: int, cluster: Cluster, splits: int, *, summed: bool) -> list[str]:
    """Terms for a data axis of `ranks` ranks; hybrids shard within one or a few nodes, and replicate across them.

    With axes inside the data axis, which divide it into `splits`, only strategies that sum over fewer ranks are tried.
    If gradients are `summed` over a model axis too, a data axis of one rank has something to shard.
    """
    if splits > 1:
        return [word for word in usual_terms(lambda traits: traits.planned, []) if _sums_apart(word)]
    if ranks == 1 and not summed:
        return [""]
    shards = [n for n in divisors(ranks) if 1 < n < ranks and n * inner >= cluster.devices_per_node]
    hybrids = [f"{ranks // n}x{n}" for n in shards[:3]] if cluster.nodes > 1 else []
    return list(usual_terms(lambda traits: traits.planned, hybrids))


def _sums_apart(text: str) -> bool:
    return data_strategy(Strategy.parse(text)).sums_apart


def _with_policies(shape: str, samples: int, allowed: Allowed, enough: float) -> Iterator[Strategy]:
    strategy = Strategy.parse(shape)
    sizes = [size for size in divisors(samples) if size & (size - 1) == 0 or size == samples]
    sizes = [size for size in sizes if size <= max(1.0, enough)]
    if strategy.stage_axis:
        sizes = [size for size in sizes if size * strategy.stage_ranks <= samples]  # else the pipeline is never full
    for precision, recompute, offload, compiled, graphs in product(
        allowed.precisions, allowed.recompute, allowed.offload, allowed.compile, allowed.graphs
    ):
        if compiled and not _compiles(strategy):
            continue
        if offload and recompute != allowed.recompute[-1]:
            continue  # offloading is only worth its bandwidth if full recomputation does not fit
        if graphs and (strategy.axes or recompute != "none" or offload or not data_strategy(strategy).captures):
            continue
        policies: Any = {"recompute": recompute, "offload": offload, "compile": compiled, "graphs": graphs}
        made = replace(strategy, precision=precision, **policies)
        for size in sizes:
            yield replace(made, micro_batch=size)
            if made.reduces_each and size < samples:
                yield replace(made, micro_batch=size, sync="last")


def _compiles(strategy: Strategy) -> bool:
    """Whether to search it with torch.compile.

    Schedules that split backward gain nothing, because compiled blocks do not; and what tp keeps when it is compiled
    cannot be foretold.
    """
    splits = bool(strategy.schedule) and FAMILIES[strategy.schedule].splits_backward
    return not splits and not strategy.inner_axes and all(term.traits.compiles for term in strategy.axes)


def complexity(strategy: Strategy) -> int:
    """Score of a strategy's moving parts: of two equally fast strategies, the less complex one is recommended."""
    axes = strategy.traits.complexity + sum(term.traits.complexity for term in strategy.axes)
    schedule = FAMILIES[strategy.schedule].complexity if strategy.schedule else 0
    policies = 2 * (strategy.recompute != "none") + 4 * bool(strategy.offload) + 3 * strategy.compile
    policies += 2 * strategy.graphs + (strategy.loss != "whole")
    policies += (strategy.sync == "last") + (strategy.reduce != "fp32")
    return axes + schedule + policies
