"""A timeline as Chrome trace events, which Perfetto and chrome://tracing open; the timeline itself lies beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.facts.timeline import IDLE, SEND, Piece, Timeline

MICROSECONDS = 1e6


def trace_document(timeline: Timeline) -> dict[str, Any]:
    """One JSON object: viewers read `traceEvents`, programs read `timeline`."""
    return {
        "traceEvents": [*_names(timeline), *(_event(piece) for piece in timeline.pieces if piece.kind != IDLE)],
        "displayTimeUnit": "ms",
        "timeline": timeline.to_json(),
    }


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _metadata(0, "process_name", name=f"{timeline.strategy} ({timeline.origin})")
    for rank in range(timeline.ranks):
        for track, name in ((2 * rank, f"rank {rank}"), (2 * rank + 1, f"rank {rank} sends")):
            yield _metadata(track, "thread_name", name=name)
            yield _metadata(track, "thread_sort_index", sort_index=track)


def _metadata(track: int, about: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": track, "name": about, "args": arguments}


def _event(piece: Piece) -> dict[str, Any]:
    """A complete event; what is sent has a track of its own, since the rank computes meanwhile."""
    about = {"stage": piece.stage, "micro_batch": piece.micro_batch, "to rank": piece.to}
    parts = {f"{cause} ms": 1e3 * seconds for cause, seconds in piece.parts.items()}
    return {
        "ph": "X",
        "pid": 0,
        "tid": 2 * piece.rank + (piece.kind == SEND),
        "name": piece.kind if piece.micro_batch is None else f"{piece.kind} {piece.micro_batch}",
        "cat": piece.kind,
        "ts": piece.start * MICROSECONDS,
        "dur": piece.seconds * MICROSECONDS,
        "args": {key: value for key, value in about.items() if value is not None} | parts,
    }
