"""The ranks of a strategy that differ in what they hold or compute."""

from __future__ import annotations

from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy


def distinct_roles(strategy: Strategy, facts: ModelFacts, global_batch: int) -> list[int]:
    """One rank of each role of a resolved strategy: each stage and, in it, the ranks with most and with least.

    Ranks of one stage differ if a sharded dim or the batch does not divide evenly: then the last ones have less.
    """
    per_stage = strategy.data_ranks * strategy.inner_ranks
    loads = [_load(strategy, facts, global_batch, data) for data in range(strategy.data_ranks)]
    chosen = sorted({loads.index(max(loads)), loads.index(min(loads))})
    return [stage * per_stage + data * strategy.inner_ranks for stage in range(strategy.stage_ranks) for data in chosen]


def _load(strategy: Strategy, facts: ModelFacts, global_batch: int, data: int) -> tuple[int, int]:
    """Samples of a data rank, and elements of the parameters' shards that it holds."""
    samples = global_batch // strategy.data_ranks + (data < global_batch % strategy.data_ranks)
    shards = strategy.shards
    held = sum(_rows(parameter.shape, shards, data % shards) for parameter in facts.parameters)
    return samples, held


def _rows(shape: tuple[int, ...], shards: int, shard: int) -> int:
    """Elements of a shard along dim 0, which is cut as `torch.chunk` cuts."""
    if not shape or shards == 1:
        return 0
    each, count = -(-shape[0] // shards), 1
    for size in shape[1:]:
        count *= size
    return max(0, min(each, shape[0] - shard * each)) * count
