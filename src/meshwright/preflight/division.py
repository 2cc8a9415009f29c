"""Sizes that a strategy does not divide evenly: it runs, but some ranks hold or do more than others."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.facts.strategy import Strategy
from meshwright.preflight.places import place_of_function
from meshwright.preflight.subject import Issue, Subject, first_and_more
from meshwright.strategies import inner_axis
from meshwright.strategies.pipeline.sizes import count_stages


def uneven(subject: Subject, strategy: Strategy) -> Iterator[Issue]:
    yield from _batch(subject, strategy)
    yield from _layers(subject, strategy)
    yield from _whole_layers(subject, strategy)


def _batch(subject: Subject, strategy: Strategy) -> Iterator[Issue]:
    size, ranks = subject.job.global_batch, strategy.data_ranks
    if size % ranks:
        yield Issue(
            kind="uneven-batch",
            what=f"A global batch of {size} over {ranks} data ranks: some get {size // ranks} samples, others "
            f"{-(-size // ranks)}, and all wait for the largest.",
            level=lambda case: "note",
            do=f"Use a global batch that {ranks} divides, such as {-(-size // ranks) * ranks}.",
            place=place_of_function(subject.job.loss),
        )


def _layers(subject: Subject, strategy: Strategy) -> Iterator[Issue]:
    blocks = subject.facts.blocks
    if strategy.stage_axis is None or subject.job.stages is not None or not blocks:
        return
    stages = count_stages(strategy)
    if len(blocks) % stages:
        yield Issue(
            kind="uneven-stages",
            what=f"{len(blocks)} blocks ({blocks[0]} to {blocks[-1]}) over {stages} stages: some stages run one more "
            "than others, and the pipeline runs at the speed of the slowest.",
            level=lambda case: "note",
            do=f"Use a number of stages that divides {len(blocks)}, or choose the cuts with Job(stages=...).",
            module=blocks[0],
            place=subject.made(blocks[0]),
        )


def _whole_layers(subject: Subject, strategy: Strategy) -> Iterator[Issue]:
    """Layers that an inner axis would divide, but not over this many ranks."""
    for term in strategy.inner_axes:
        kept = inner_axis(term).undivided(subject.facts, term.size)
        if kept:
            names = list(kept)
            yield Issue(
                kind="undivided-layer",
                what=f"Not divided by {term}: {first_and_more(names)}, {kept[names[0]]}.",
                level=lambda case: "note",
                do="Use a size of the axis that divides it, or pad it in the model.",
                module=names[0],
                place=subject.made(names[0]),
            )
