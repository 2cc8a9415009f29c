"""Measured steps of a comparison as Chrome trace events, which Perfetto opens: a process a strategy, a track a rank.

A pipeline is its timeline, as measured and as forecast. Of every strategy there is also the profiled step: when each
rank computed, and when its communication was under way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.facts.timeline import Timeline
from meshwright.report.html import write_file
from meshwright.report.timeline_trace import MICROSECONDS, trace_document

Event = dict[str, Any]


def write_trace(document: dict[str, Any], profiles: dict[str, list[dict[str, Any]]], path: Path) -> None:
    text = json.dumps({"traceEvents": list(trace_events(document, profiles)), "displayTimeUnit": "ms"})
    write_file(text, path, what="trace")


def trace_events(document: dict[str, Any], profiles: dict[str, list[dict[str, Any]]]) -> Iterator[Event]:
    """All that was measured; every strategy's part begins at zero."""
    process = 0
    for row in document["results"]:
        for key in ("timeline", "forecast_timeline"):
            if row[key] is not None:
                yield from _under(process, trace_document(Timeline.from_json(row[key]))["traceEvents"])
                process += 1
        if profiles.get(row["strategy"]):
            yield from _under(process, _profiled(row["strategy"], profiles[row["strategy"]]))
            process += 1


def _under(process: int, events: list[Event] | Iterator[Event]) -> Iterator[Event]:
    return ({**event, "pid": process} for event in events)


def _profiled(strategy: str, ranks: list[dict[str, Any]]) -> Iterator[Event]:
    yield _metadata(0, "process_name", name=f"{strategy} (profiled step)")
    for rank, profile in enumerate(ranks):
        for offset, kind in enumerate(("compute", "communication")):
            track = 2 * rank + offset
            yield _metadata(track, "thread_name", name=f"rank {rank} {kind}")
            yield _metadata(track, "thread_sort_index", sort_index=track)
            yield from (_span(track, kind, start, end) for start, end in profile[kind])


def _metadata(track: int, about: str, **arguments: Any) -> Event:
    return {"ph": "M", "pid": 0, "tid": track, "name": about, "args": arguments}


def _span(track: int, kind: str, start: float, end: float) -> Event:
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"ph": "X", "pid": 0, "tid": track, "name": kind, "cat": kind, **times}
