"""Turn one measured step of a pipeline into a timeline, of the same type as a forecast."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import BACKWARD, DATA, FORWARD, INPUT, SEND, UPDATE, WEIGHT, Piece, Timeline, with_idle
from meshwright.schedules.action import Action, Kind

KINDS = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD, Kind.BACKWARD_INPUT: INPUT, Kind.BACKWARD_WEIGHT: WEIGHT}


def measured_timeline(strategy: Strategy, ranks: Sequence[dict[str, Any]], seconds: Sequence[float]) -> Timeline:
    """Timeline of the step with the median time, on the first rank of every stage."""
    middle = sorted(range(len(seconds)), key=seconds.__getitem__)[len(seconds) // 2]
    steps = [rank["steps"][middle] for rank in ranks]
    begun = min(start for start, *_ in steps)
    first = {rank["place"]["pipeline"]: step for rank, step in zip(reversed(ranks), reversed(steps), strict=True)}
    # The gradient norm needs all ranks, so the update begins when the last rank has its gradients.
    met = max(gradients for _, gradients, _, _ in steps)
    pieces = [piece for place, step in first.items() for piece in _pieces(place, step, begun, met, strategy)]
    pieces += list(_sends(pieces))
    return Timeline(
        strategy=str(strategy),
        schedule=strategy.schedule,
        ranks=strategy.stage_ranks,
        micro_batches=1 + max(piece.micro_batch for piece in pieces if piece.micro_batch is not None),
        origin="measured",
        pieces=with_idle(pieces, strategy.stage_ranks),
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
    if strategy.reduced_ranks > 1 and gradients > last:
        yield Piece(rank=rank, kind=DATA, start=last - begun, end=gradients - begun)
    if end > met:
        yield Piece(rank=rank, kind=UPDATE, start=met - begun, end=end - begun)


def _sends(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Sends that a receiver waited for: the result was ready and the receiver idle, but the message had not arrived.

    A message that arrives while its receiver computes is not measured, and costs nothing.
    """
    actions = sorted((piece for piece in pieces if piece.micro_batch is not None), key=lambda piece: piece.start)
    ends: dict[int, list[float]] = {}
    receivers: dict[tuple[object, ...], list[Piece]] = {}
    for piece in actions:
        ends.setdefault(piece.rank, []).append(piece.end)
        receivers.setdefault((_offset(piece), piece.stage, piece.micro_batch), []).append(piece)
    for piece in actions:
        offset = _offset(piece)
        waiting = receivers.get((offset, (piece.stage or 0) + offset, piece.micro_batch)) if offset else None
        if not waiting:
            continue
        receiver = waiting.pop(0)
        before = bisect_right(ends[receiver.rank], receiver.start)
        start = max(piece.end, ends[receiver.rank][before - 1] if before else 0.0)
        if receiver.rank != piece.rank and receiver.start > start:
            yield Piece(
                rank=piece.rank,
                kind=SEND,
                start=start,
                end=receiver.start,
                stage=piece.stage,
                micro_batch=piece.micro_batch,
                to=receiver.rank,
            )


def _offset(piece: Piece) -> int:
    """Offset to the stage that receives the result; 0 if none does."""
    return {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(piece.kind, 0)
