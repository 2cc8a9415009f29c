"""What Perfetto asks of a file of trace events: its importer drops what does not keep to it, without a word."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from meshwright.api.job_planner import PlanOptions, open_planner, read_cluster
from meshwright.api.timeline import forecast_timeline
from meshwright.facts.strategy import Strategy
from meshwright.report.trace_events import timeline_events, trace_events

Event = dict[str, Any]


@pytest.fixture(scope="module")
def timelines() -> dict[str, Any]:
    planner, cluster = open_planner("preset:gpt2:seq=256", PlanOptions(global_batch=32)), read_cluster("4xA100-40GB")
    strategies = [Strategy.parse(f"pp=4:{schedule},bf16,mb=1") for schedule in ("1f1b", "interleaved", "zbv")]
    planner.search_named(cluster, strategies)
    return {str(s): forecast_timeline(planner.context(cluster), s.resolve(4)) for s in strategies}


def complain(events: Iterable[Event]) -> list[str]:
    """What the importer would not take."""
    events = list(events)
    tracks: dict[int, list[Event]] = {}
    owners: dict[int, set[int]] = {}
    found = [f"{event} is the idle process's" for event in events if not event["pid"] or event.get("tid") == 0]
    for event in events:
        if "tid" in event:
            owners.setdefault(event["tid"], set()).add(event["pid"])
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append(event)
    found += [f"track {tid} is in processes {pids}" for tid, pids in owners.items() if len(pids) > 1]
    for track in tracks.values():
        inorder = sorted(track, key=lambda event: event["ts"])
        found += [f"{a} meets {b}" for a, b in pairwise(inorder) if a["ts"] + a["dur"] > b["ts"]]
        found += [f"{event} is not in whole microseconds" for event in track if not isinstance(event["ts"], int)]
    return found


def test_no_event_of_a_timeline_is_dropped(timelines: dict[str, Any]) -> None:
    for timeline in timelines.values():
        events = list(timeline_events(timeline))
        assert complain(events) == []
        shown = sum(piece.kind != "idle" for piece in timeline.pieces)
        assert sum(event["ph"] == "X" for event in events) == shown


def test_strategies_of_a_comparison_have_tracks_of_their_own(timelines: dict[str, Any]) -> None:
    rows = [
        {"strategy": name, "timeline": timeline.to_json(), "forecast_timeline": timeline.to_json()}
        for name, timeline in timelines.items()
    ]
    profile = [{"compute": [(0.0, 0.1), (0.1, 0.25)], "communication": [(0.05, 0.2)]}] * 4
    events = list(trace_events({"results": rows}, dict.fromkeys(timelines, profile)))
    assert complain(events) == []
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(named) == 9 and len({event["pid"] for event in events}) == 9


def test_a_complaint_is_made() -> None:
    event = {"ph": "X", "pid": 1, "tid": 5, "ts": 0, "dur": 10}
    assert len(complain([event, {**event, "ts": 9}])) == 1
    assert len(complain([event, {**event, "pid": 2, "ts": 20}])) == 1
    assert len(complain([{**event, "pid": 0}])) == 1
