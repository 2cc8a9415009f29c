"""Measured steps of a comparison as Chrome trace events for Perfetto: one process per strategy, one track per rank.

A pipeline has its timeline, measured and forecast. Every strategy has its profiled step: when each rank computed, and
when it communicated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from meshwright.facts.timeline import Timeline
from meshwright.report.html import write_file
from meshwright.report.timeline_trace import Event, process_name, span, timeline_events, track_names


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
