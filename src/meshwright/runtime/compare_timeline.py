"""One measured step of a pipeline as a timeline, of the same type as a forecast one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import BACKWARD, DATA, FORWARD, INPUT, UPDATE, WEIGHT, Piece, Timeline, with_idle
from meshwright.schedules.action import Action, Kind
from meshwright.strategies.pipeline import pipeline_ranks, schedule_name

KINDS = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD, Kind.BACKWARD_INPUT: INPUT, Kind.BACKWARD_WEIGHT: WEIGHT}


def measured_timeline(strategy: Strategy, ranks: Sequence[dict[str, Any]], seconds: Sequence[float]) -> Timeline:
    """The step whose time is the median, on the first rank of every stage; what is sent is not told apart."""
    middle = sorted(range(len(seconds)), key=seconds.__getitem__)[len(seconds) // 2]
    steps = [rank["steps"][middle] for rank in ranks]
    begun = min(start for start, *_ in steps)
    first = {rank["place"]["pipeline"]: step for rank, step in zip(reversed(ranks), reversed(steps), strict=True)}
    # The gradients' norm is everybody's, so the update begins when the last rank has its gradients.
    met = max(gradients for _, gradients, _, _ in steps)
    pieces = [piece for place, step in first.items() for piece in _pieces(place, step, begun, met, strategy)]
    return Timeline(
        strategy=str(strategy),
        schedule=schedule_name(strategy),
        ranks=pipeline_ranks(strategy),
        micro_batches=1 + max(piece.micro_batch for piece in pieces if piece.micro_batch is not None),
        origin="measured",
        pieces=with_idle(pieces, pipeline_ranks(strategy)),
    )


def _pieces(rank: int, step: Sequence[Any], begun: float, met: float, strategy: Strategy) -> Iterator[Piece]:
    _, gradients, end, actions = step
    for text, started, ended in actions:
        action = Action.parse(text)
        yield Piece(
            rank=rank,
            kind=KINDS[action.kind],
            start=started - begun,
            end=ended - begun,
            stage=action.stage,
            micro_batch=action.micro_batch,
        )
    last = max((ended for *_, ended in actions), default=begun)
    if strategy.data_ranks > 1 and gradients > last:
        yield Piece(rank=rank, kind=DATA, start=last - begun, end=gradients - begun)
    if end > met:
        yield Piece(rank=rank, kind=UPDATE, start=met - begun, end=end - begun)
