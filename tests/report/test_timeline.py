"""Timelines of pipelines that nobody ran: the times, the picture, and the file that Perfetto opens."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.api.job_planner import PlanOptions, open_planner, read_cluster
from meshwright.api.timeline import first_timeline, forecast_timeline
from meshwright.cli.main import app
from meshwright.errors import BadInput, Refused
from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import (
    DATA,
    FORWARD,
    IDLE,
    INPUT,
    KINDS,
    SEND,
    UPDATE,
    WEIGHT,
    Piece,
    Timeline,
    with_idle,
)
from meshwright.planner.search import PlanContext, consider
from meshwright.report.charts import Plot, plotly_script, scripts
from meshwright.report.charts_timeline import piece_lines
from meshwright.report.timeline import DRAWN, draw, timeline_page, write_timeline
from meshwright.report.trace_events import trace_document
from meshwright.units import show_seconds

pytest.importorskip("plotly", reason="pages need meshwright[pages]")

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
BATCH = 64


@cache
def context() -> PlanContext:
    planner, cluster = open_planner("preset:gpt2:seq=256", PlanOptions(global_batch=BATCH)), read_cluster("4xA100-40GB")
    planner.search_named(cluster, [Strategy.parse("ddp,bf16"), Strategy.parse("ddp,bf16,ac=full")])
    return planner.context(cluster)


@cache
def timeline(text: str) -> Timeline:
    return forecast_timeline(context(), Strategy.parse(text).resolve(4))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb", "zbv"])
@pytest.mark.parametrize("policy", ["", ",ac=full"])
def test_playing_it_through_agrees_with_the_closed_form(schedule: str, policy: str) -> None:
    text = f"pp=4:{schedule},bf16,mb=1{policy}"
    closed = consider(context(), Strategy.parse(text)).forecast.step
    assert timeline(text).total == pytest.approx(closed, rel=0.06)


def test_every_micro_batch_passes_every_stage() -> None:
    found = timeline("pp=4:zbv,bf16,mb=2")
    for kind in (FORWARD, WEIGHT):
        passes = [(piece.stage, piece.micro_batch) for piece in found.pieces if piece.kind == kind]
        assert sorted(passes) == [(stage, number) for stage in range(8) for number in range(BATCH // 2)]
    assert not any(piece.kind == "backward" for piece in found.pieces)


def test_a_rank_does_one_thing_at_a_time_and_its_time_is_accounted_for() -> None:
    for text in ("ddp=2,pp=2:1f1b,bf16,mb=4", "pp=4:interleaved,bf16,mb=4", "layers=4,bf16,mb=16"):
        found = timeline(text)
        for rank in range(found.ranks):
            own = [piece for piece in found.of(rank) if piece.kind != SEND]
            assert own[0].start == 0.0 and own[-1].end == pytest.approx(found.total)
            for before, after in itertools.pairwise(own):
                assert after.start == pytest.approx(before.end)


def test_what_is_sent_arrives_before_it_is_used() -> None:
    found = timeline("pp=4:1f1b,bf16,mb=4")
    begun = {(p.stage, p.micro_batch): p.start for p in found.pieces if p.kind == FORWARD}
    sent = [p for p in found.pieces if p.kind == SEND and p.to == p.rank + 1]
    assert len(sent) == 3 * BATCH // 4
    assert all(begun[p.stage + 1, p.micro_batch] >= p.end - 1e-12 for p in sent if p.stage is not None)


def test_a_step_ends_with_the_data_axis_and_the_update() -> None:
    found = timeline("ddp=2,pp=2:1f1b,bf16,mb=4")
    kinds = [piece.kind for piece in found.of(0)]
    assert kinds[-1] == UPDATE and DATA in kinds
    assert DATA not in {piece.kind for piece in timeline("pp=4:1f1b,bf16,mb=4").pieces}


def test_recomputing_goes_with_the_inputs_part() -> None:
    parts = {}
    for policy in ("", ",ac=full"):
        pieces = timeline(f"pp=4:zb,bf16,mb=4{policy}").of(1)
        seconds = {kind: next(p.seconds for p in pieces if p.kind == kind) for kind in (INPUT, WEIGHT)}
        parts[policy] = seconds[WEIGHT] / sum(seconds.values())
    assert parts[""] == pytest.approx(0.5, abs=0.05)
    assert parts[",ac=full"] == pytest.approx(1 / 3, abs=0.06)


def test_json_reads_back() -> None:
    found = timeline("ddp=2,pp=2:1f1b,bf16,mb=4")
    assert Timeline.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_gaps_are_idle() -> None:
    pieces = [Piece(rank=0, kind=FORWARD, start=1.0, end=2.0), Piece(rank=1, kind=FORWARD, start=0.0, end=4.0)]
    found = [(p.rank, p.kind, p.start, p.end) for p in with_idle(pieces, 2)]
    assert found == [(0, IDLE, 0.0, 1.0), (0, FORWARD, 1.0, 2.0), (0, IDLE, 2.0, 4.0), (1, FORWARD, 0.0, 4.0)]
    with pytest.raises(ValueError, match="Unknown kind 'waiting'"):
        Piece(rank=0, kind="waiting", start=0.0, end=1.0)


def test_a_plan_without_a_pipeline_has_none() -> None:
    with pytest.raises(Refused, match="has no pipeline"):
        forecast_timeline(context(), Strategy.parse("ddp=4,bf16"))
    plans = [consider(context(), Strategy.parse(text)) for text in ("ddp=4,bf16", "pp=4:1f1b,bf16,mb=1")]
    found = first_timeline(context(), plans)
    assert found is not None and found.strategy == "pp=4:1f1b,bf16,mb=1"
    assert first_timeline(context(), plans, largest=100) is None


def boxes(plot: Plot, kind: str, rank: int) -> list[tuple[float, float]]:
    """Start and length in milliseconds of what is drawn in a rank's row."""
    found = [trace for trace in plot.data if trace["name"] == kind]
    return [
        (start, length)
        for trace in found
        for start, length, y in zip(trace["base"], trace["x"], trace["y"], strict=True)
        if round(y) == rank
    ]


def test_every_piece_lies_where_its_time_is() -> None:
    found = timeline("pp=4:1f1b,bf16,mb=8")
    drawing = draw(found)
    for rank in range(4):
        for kind in KINDS:
            expected = [(1e3 * piece.start, 1e3 * piece.seconds) for piece in found.of(rank) if piece.kind == kind]
            assert boxes(drawing.plot, kind, rank) == expected
    assert "left out" not in drawing.note
    assert sum(spent.share for spent in drawing.rows[2].spent if spent.kind != SEND) == pytest.approx(1.0)
    assert drawing.plot.layout["xaxis"]["range"] == pytest.approx([0, 1e3 * found.total])
    (legend,) = drawing.plot.legends
    assert [key.label for key in legend[1]] == [kind for kind in KINDS if any(p.kind == kind for p in found.pieces)]


def test_a_box_tells_its_exact_figures_and_its_micro_batch() -> None:
    found = timeline("pp=4:1f1b,bf16,mb=8")
    forward = next(trace for trace in draw(found).plot.data if trace["name"] == FORWARD)
    first = next(piece for piece in found.of(2) if piece.kind == FORWARD)
    place = forward["hovertext"].index("<br>".join(piece_lines(first)))
    assert forward["text"][place] == "0"
    assert f"{1e3 * first.seconds:,.3f} ms" in piece_lines(first)
    assert f"from {1e3 * first.start:,.3f} to {1e3 * first.end:,.3f} ms" in piece_lines(first)
    assert any(line.startswith("compute ") for line in piece_lines(first))


def test_of_a_long_step_the_middle_is_left_out() -> None:
    found = timeline("pp=4:zbv,bf16,mb=1")
    drawing = draw(found)
    assert len(found.pieces) > 2 * DRAWN
    assert sum(len(trace["x"]) for trace in drawing.plot.data) < 1.3 * DRAWN
    first, last = (drawing.plot.layout[name] for name in ("xaxis", "xaxis2"))
    assert first["range"][0] == 0 and last["range"][1] == pytest.approx(1e3 * found.total)
    missing = last["range"][0] - first["range"][1]
    assert missing > 0 and f"The middle, {show_seconds(missing / 1e3)} of the same, is left out." in drawing.note
    assert first["domain"][1] < 0.5 < last["domain"][0]
    for trace in drawing.plot.data:
        start, end = (last if trace["xaxis"] == "x2" else first)["range"]
        assert all(at < end and at + x > start for at, x in zip(trace["base"], trace["x"], strict=True))


def test_trace_events_have_what_viewers_need() -> None:
    found = timeline("ddp=2,pp=2:1f1b,bf16,mb=4")
    events = trace_document(found)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(piece.kind != IDLE for piece in found.pieces)
    assert all({"pid", "tid", "ts", "dur", "name"} <= event.keys() for event in complete)
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(1e6 * found.total, abs=1)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["rank 0", "rank 0 sends", "rank 1", "rank 1 sends"]


def test_the_page_asks_nothing_of_a_network() -> None:
    text = timeline_page(timeline("pp=4:1f1b,bf16,mb=8"))
    assert all(text.count(f"<script>{script}</script>") == 1 for script in scripts())
    own = text.replace(plotly_script(), "")
    assert "http" not in own.replace("http-equiv", "") and "url(" not in own


def test_the_ending_of_the_file_decides(tmp_path: Path) -> None:
    found = timeline("pp=4:1f1b,bf16,mb=8")
    for name in ("a.html", "a.json"):
        write_timeline(found, tmp_path / name)
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert Timeline.from_json(json.loads((tmp_path / "a.json").read_text())["timeline"]) == found
    with pytest.raises(BadInput, match=r"must end in \.html"):
        write_timeline(found, tmp_path / "a.png")


def test_plan_writes_both(tmp_path: Path) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "timeline.json"
    words = ["plan", GPT, "--on", "4xA100-40GB", "--fast", "--strategies", "ddp,bf16", "pp=4:1f1b,bf16,mb=2"]
    found = CliRunner().invoke(app, [*words, "--html", str(page), "--timeline", str(trace)])
    assert found.exit_code == 0, found.output
    assert "Timeline of <code>pp=4:1f1b,bf16,mb=2</code>" in page.read_text()
    assert json.loads(trace.read_text())["timeline"]["micro_batches"] == 8
    failed = CliRunner().invoke(app, [*words[:-1], "--timeline", str(trace)])
    assert isinstance(failed.exception, Refused) and "none of the 1 plans has one" in str(failed.exception)
