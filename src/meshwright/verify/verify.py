"""Prove that a strategy trains as plain PyTorch does, or name the first difference.

Plain PyTorch takes a few optimizer steps in one process. Each strategy takes the same steps from the same seed on the
same global batches. Initial values, gradients, losses, gradient norms, parameters and buffers are compared. Dropout is
off where one process cannot draw the strategy's masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.assemble.check import check
from meshwright.assemble.world import World
from meshwright.errors import BadInput
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.runtime.place import place_of
from meshwright.verify.evidence import Reference
from meshwright.verify.references import LocalReferences, References, keeps_dropout, own_place
from meshwright.verify.strategy_steps import Plant, run_steps
from meshwright.verify.verdict import REFUSED, Verdict, judge, without_verdict

DROPOUT = (
    "dropout was off; in training this strategy may draw other masks than one process does: "
    "equal in distribution, not in bits"
)


def verify(
    job: Job,
    facts: ModelFacts,
    strategies: Sequence[str],
    world: World,
    *,
    steps: int = 3,
    seed: int = 0,
    plant: Plant | None = None,
    references: References | None = None,
) -> Iterator[Verdict]:
    """Yield one verdict per strategy, the same on every rank. Rank 0 reads the references, or makes them."""
    if references is None:
        references = LocalReferences(job, facts, world.device, steps=steps, seed=seed)
    for text in strategies:
        strategy = Strategy.parse(text)
        try:
            resolved = check(job, facts, strategy, own_place(strategy, place_of(world)))
        except BadInput as reason:  # the same on all ranks
            yield without_verdict(text, REFUSED, str(reason))
            continue
        if resolved.traits.one_process:  # compared in the process that makes the references
            alone = replace(references.verdict_on_process(resolved), strategy=text) if world.is_main else None
            yield world.gather(alone)[0]
            continue
        reference = references.of(resolved) if world.is_main else None
        double = world.gather(reference is not None and reference.precision == "float64")[0]
        dropout = keeps_dropout(resolved, facts, job.global_batch)
        trace = run_steps(
            job, facts, resolved, world, steps=steps, seed=seed, double=double, dropout=dropout, plant=plant
        )
        verdict = None if reference is None else judge(text, trace, _widened(reference, resolved))
        if verdict is not None and facts.drops and not dropout:
            verdict = replace(verdict, note="; ".join(note for note in (verdict.note, DROPOUT) if note))
        yield world.gather(verdict)[0]


def _widened(reference: Reference, strategy: Strategy) -> Reference:
    """The reference with the bounds of a strategy that rounds gradients before it sums them over ranks."""
    return reference if strategy.reduce == "fp32" else replace(reference, reduced_over=strategy.reduced_ranks)
