"""How much blocks keep for backward in a model that is compiled as a whole, relative to the same blocks run eagerly.

A compiler recomputes cheap results, and a library may take another path when it is compiled: transformers makes masks
that it leaves out otherwise, and then attention takes another kernel. So the share is measured for each model, from
compiled steps with few blocks and few samples.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.facts.costs import ModelCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import Strategy
from meshwright.tracing.block_stack import find_repeated_blocks
from meshwright.tracing.costs import LOSS
from meshwright.tracing.extrapolate import with_fewer_blocks
from meshwright.tracing.record_step import record_step
from meshwright.tracing.step import SIZES_COMPILED, refuse_trace

SAMPLES = 2


def compiled_share(job: Job, facts: ModelFacts, costs: ModelCosts) -> float:
    """Bytes that compiled blocks keep, by what eager ones do; 1 for a model whose blocks keep nothing.

    Of a model without repeated blocks, all units count.
    """
    few = replace(job, global_batch=SAMPLES)
    strategy = refuse_trace(few, facts, Strategy.parse(f"single,{costs.precision},compile"), 1, "cuda")
    stack = find_repeated_blocks(facts)
    if stack is not None and not stack.before and stack.blocks >= SIZES_COMPILED[1]:
        shorter = [with_fewer_blocks(few, facts, strategy, stack, size) for size in SIZES_COMPILED]
        small, large = (_kept(each.job, each.facts, strategy) for each in shorter if each is not None)
        last = next(unit for unit in costs.units if unit.name == f"{stack.name}.{stack.blocks - 1}")
        kept, eager = (large - small) / (SIZES_COMPILED[1] - SIZES_COMPILED[0]), last.kept.at(SAMPLES)
    else:
        kept = _kept(few, facts, strategy)
        eager = sum(unit.kept.at(SAMPLES) for unit in costs.units if unit.name != LOSS)
    return kept / eager if eager > 0 else 1.0


def _kept(job: Job, facts: ModelFacts, strategy: Strategy) -> float:
    """The most bytes of activations at any moment of a step, without the low-precision copies of the parameters."""
    recorded = record_step(job, facts, strategy, 1, 0)
    low = FORMATS[strategy.precision].bytes
    copies = max(causes["parameters"] for causes in recorded.peaks.values()) * low / 4 if low < 4 else 0.0
    return max(causes["activations"] for causes in recorded.peaks.values()) - copies
