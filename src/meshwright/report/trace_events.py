"""Timelines and measured steps as Chrome trace events for Perfetto.

A file of one timeline also stores the timeline itself. A comparison has one process per strategy, one track per rank:
a pipeline's timeline, measured and forecast, and for every strategy when each rank computed and communicated.

Perfetto has undocumented demands. A track's number must be unique in the whole file, because its name depends on it
alone. Process 0 and thread 0 mean idle. Two events on a track must nest or be disjoint; otherwise the later one is
dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from meshwright.facts.timeline import IDLE, SEND, Piece, Timeline
from meshwright.report.html import write_file

Event = dict[str, Any]
_TRACKS = 10_000
"""Track numbers reserved for each process."""


def trace_document(timeline: Timeline) -> dict[str, Any]:
    """One JSON object: viewers read `traceEvents`, programs read `timeline`."""
    events = list(timeline_events(timeline))
    return {"traceEvents": events, "displayTimeUnit": "ms", "timeline": timeline.to_json()}


def timeline_events(timeline: Timeline, process: int = 1) -> Iterator[Event]:
    """A process with a track for each rank, and further tracks for its sends, which overlap with compute."""
    yield process_name(process, f"{timeline.strategy} ({timeline.origin})")
    first = 0
    for rank in range(timeline.ranks):
        pieces = [piece for piece in timeline.of(rank) if piece.kind != IDLE]
        rows = [[piece for piece in pieces if piece.kind != SEND], *_rows(p for p in pieces if p.kind == SEND)]
        for track, row in enumerate(rows, first):
            yield from track_names(process, track, f"rank {rank} sends" if track > first else f"rank {rank}")
            yield from (_event(process, track, piece) for piece in row)
        first += len(rows)


def process_name(process: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}


def track_names(process: int, track: int, name: str) -> Iterator[Event]:
    for about, arguments in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track})):
        yield {"ph": "M", "pid": process, "tid": _number(process, track), "name": about, "args": arguments}


def span(process: int, track: int, name: str, kind: str, start: float, end: float) -> Event:
    """A complete event. Times are rounded to whole microseconds, so that adjacent events stay adjacent."""
    begun, ended = round(start * 1e6), round(end * 1e6)
    times = {"ts": begun, "dur": ended - begun}
    return {"ph": "X", "pid": process, "tid": _number(process, track), "name": name, "cat": kind, **times}


def _number(process: int, track: int) -> int:
    return _TRACKS * process + track


def _rows(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Distribute pieces over as few rows as possible so that none overlap."""
    rows: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if free := next((row for row in rows if row[-1].end <= piece.start), None):
            free.append(piece)
        else:
            rows.append([piece])
    return rows


def _event(process: int, track: int, piece: Piece) -> Event:
    about = {"stage": piece.stage, "micro_batch": piece.micro_batch, "to rank": piece.to}
    parts = {f"{cause} ms": 1e3 * seconds for cause, seconds in piece.parts.items()}
    name = piece.kind if piece.micro_batch is None else f"{piece.kind} {piece.micro_batch}"
    known = {key: value for key, value in about.items() if value is not None}
    return {**span(process, track, name, piece.kind, piece.start, piece.end), "args": known | parts}


def write_trace(document: dict[str, Any], profiles: dict[str, list[dict[str, Any]]], path: Path) -> None:
    text = json.dumps({"traceEvents": list(trace_events(document, profiles)), "displayTimeUnit": "ms"})
    write_file(text, path, what="trace")


def trace_events(document: dict[str, Any], profiles: dict[str, list[dict[str, Any]]]) -> Iterator[Event]:
    """All measured events; every strategy starts at time zero."""
    processes = count(1)
    for row in document["results"]:
        for key in ("timeline", "forecast_timeline"):
            if row[key] is not None:
                yield from timeline_events(Timeline.from_json(row[key]), next(processes))
        if profiles.get(row["strategy"]):
            yield from _profiled(row["strategy"], profiles[row["strategy"]], next(processes))


def _profiled(strategy: str, ranks: list[dict[str, Any]], process: int) -> Iterator[Event]:
    yield process_name(process, f"{strategy} (profiled step)")
    for rank, profile in enumerate(ranks):
        for track, kind in enumerate(("compute", "communication"), 2 * rank):
            yield from track_names(process, track, f"rank {rank} {kind}")
            yield from (span(process, track, kind, kind, start, end) for start, end in profile[kind])
