"""Tables, CSV, trace events and the page of a comparison: right figures, nothing let through, nothing asked for."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chromium import open_browser, overflow, visit
from compare_outcomes import Starts, made_up
from meshwright import comparing
from meshwright.comparing import bubble_of, forecast_of, this_machine, with_forecast
from meshwright.errors import OutputError
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import Timeline
from meshwright.planning import Planner
from meshwright.report.compare import check_folders, comparison_page, csv_text
from meshwright.report.compare_bars import memory_chart, time_chart
from meshwright.report.compare_curves import loss_curves
from meshwright.report.compare_html import page, write_page
from meshwright.report.compare_mesh import draw_meshes
from meshwright.report.compare_trace import trace_events, write_trace
from meshwright.runtime.compare import Compared
from meshwright.runtime.compare_start import Outcome
from meshwright.runtime.probe_machine import local_cluster
from meshwright.units import MIB

EMPTY: dict[str, Any] = {
    **{"job": "job.py", "ranks": 2, "device": "cpu", "cluster": "2xcpu", "global_batch": 16, "steps": 3, "rounds": 1},
    **{"note": "", "references": [], "left_out": [], "seconds": 1.0},
}
ATTACK = "\"'><script>alert(1)</script>&amp;"


@pytest.fixture(scope="module")
def compared() -> Compared:
    starts = Starts(zero1=Outcome(status="out of memory", reason="Rank 1 failed: not enough memory."))
    return made_up("ddp", "zero1", "zero2", "pp=2:gpipe,mb=16", starts=starts)


@pytest.fixture(scope="module")
def document(compared: Compared) -> dict[str, Any]:
    planner, cluster = Planner(compared.job, compared.facts, compared.job.global_batch), local_cluster("cpu", devices=2)
    rows = [with_forecast(row, planner, cluster, compared.strategies[row["strategy"]]) for row in compared.rows]
    return {
        **{"job": "job.py", "ranks": 2, "device": "cpu", "cluster": str(cluster), "global_batch": 16, "steps": 3},
        **{"rounds": 2, "note": "", "results": rows, "references": compared.references, "seconds": 61.0},
        "left_out": [{"strategy": "tp=2", "reason": "No layer of it divides by 2."}],
    }


def test_every_row_has_its_forecast_beside_it(document: dict[str, Any]) -> None:
    by_name = {row["strategy"]: row for row in document["results"]}
    for name in ("ddp", "zero2", "pp=2:gpipe,mb=16"):
        row = by_name[name]
        assert row["forecast"]["step_ms"] == pytest.approx(sum(row["forecast"]["time"].values()))
        assert row["forecast"]["error"]["time"] == pytest.approx(row["forecast"]["step_ms"] / row["step_ms"] - 1)
    assert by_name["zero1"]["forecast"]["error"] == {"time": None, "memory": None}
    pipeline = by_name["pp=2:gpipe,mb=16"]
    assert (pipeline["timeline"]["origin"], pipeline["forecast_timeline"]["origin"]) == ("measured", "forecast")
    assert by_name["ddp"]["forecast_timeline"] is None
    # One micro-batch goes through two stages: a rank idles while the other computes, and while it waits for messages.
    assert 0.45 < pipeline["forecast"]["bubble"] < 1
    assert pipeline["bubble"] == pytest.approx(bubble_of(Timeline.from_json(pipeline["timeline"])))


def test_a_forecast_that_fails_does_not_take_the_row_with_it(compared: Compared) -> None:
    class Broken:
        def search_named(self, *args: object) -> None:
            raise ZeroDivisionError("by no bandwidth")

    row = with_forecast(compared.rows[0], Broken(), local_cluster("cpu"), Strategy.parse("ddp"))  # type: ignore[arg-type]
    assert row["step_ms"] == compared.rows[0]["step_ms"]
    assert row["forecast"] == {"reason": "ZeroDivisionError: by no bandwidth."}
    assert "forecast" in page({**EMPTY, "results": [row]}) and csv_text({"results": [row]})
    Console(file=io.StringIO()).print(comparison_page({**EMPTY, "results": [row]}))


def test_a_folder_that_is_not_there_is_told_before_anything_runs(tmp_path: Path) -> None:
    check_folders(None, tmp_path / "rows.csv")
    with pytest.raises(OutputError, match="there is no folder"):
        check_folders(tmp_path / "gone" / "page.html")


def test_ranks_that_share_cores_are_foretold_a_part_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "count_cores", lambda: 2)
    own, shared = hardware_of(this_machine("cpu", 2)), hardware_of(this_machine("cpu", 8))
    assert shared.flops["fp32"] == pytest.approx(own.flops["fp32"] / 4)
    assert shared.bandwidth == pytest.approx(own.bandwidth / 4)


def test_a_forecast_s_figures_and_how_far_they_are_off() -> None:
    forecast = Forecast(memory={"parameters": 3 * MIB, "allocator": MIB}, time={"compute": 0.09, "bubble": 0.03})
    plan = Plan(strategy=Strategy.parse("pp=2:1f1b").resolve(2), forecast=forecast, fits=True)
    told = forecast_of(plan, {"step_ms": 100.0, "peak_mib": 6.0})
    assert (told["step_ms"], told["peak_mib"], told["bubble"]) == pytest.approx((120.0, 3.0, 0.25))
    assert told["error"] == pytest.approx({"time": 0.2, "memory": -0.5})


def test_the_table_says_what_went_wrong(document: dict[str, Any]) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(comparison_page(document))
    text = console.export_text()
    assert "zero1: out of memory: Rank 1 failed: not enough memory." in text
    assert "left out: tp=2: No layer of it divides by 2." in text
    line = next(line for line in text.splitlines() if line.startswith("│ zero2"))
    assert "200.0" in line and "0.50" in line and "DIFFERS" in line and "40%" in line and "30%" in line


def test_csv_has_a_line_a_strategy(document: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(document))))
    assert [row["strategy"] for row in rows] == [row["strategy"] for row in document["results"]]
    assert float(rows[0]["step_ms"]) == document["results"][0]["step_ms"]
    assert rows[-1]["status"] == "out of memory" and rows[-1]["step_ms"] == ""
    assert float(rows[0]["memory_mib: optimizer"]) == 2.0


def test_trace_events_of_every_strategy_that_ran(document: dict[str, Any], compared: Compared, tmp_path: Path) -> None:
    write_trace(document, compared.profiles, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == list(trace_events(document, compared.profiles))
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == [
        "ddp (profiled step)",
        "pp=2:gpipe,mb=16 (forecast)",
        "pp=2:gpipe,mb=16 (measured)",
        "pp=2:gpipe,mb=16 (profiled step)",
        "zero2 (profiled step)",
    ]
    number = next(pid for pid, name in processes.items() if name == "zero2 (profiled step)")
    spans = [event for event in events if event["pid"] == number and event["ph"] == "X"]
    assert {(span["cat"], round(span["ts"]), round(span["dur"])) for span in spans} == {
        ("compute", 0, 100_000),
        ("communication", 80_000, 80_000),
    }


def test_bars_share_one_scale(document: dict[str, Any]) -> None:
    rows = [row for row in document["results"] if row["status"] == "ok"]
    for chart, total in ((time_chart(rows), "step_ms"), (memory_chart(rows), "peak_mib")):
        widths = {pair.strategy: sum(part.width for part in pair.measured.parts) for pair in chart.pairs}
        first, second = rows[0], rows[-1]
        ratio = widths[second["strategy"]] / widths[first["strategy"]]
        assert ratio == pytest.approx(second[total] / first[total])
        every = [bar for pair in chart.pairs for bar in (pair.measured, pair.forecast) if bar is not None]
        assert max(sum(part.width for part in bar.parts) for bar in every) == pytest.approx(100.0)


def test_curves_that_are_equal_lie_on_each_other(document: dict[str, Any]) -> None:
    curves = loss_curves([row for row in document["results"] if row["losses"]], checked=2)
    assert curves is not None
    lines = {curve.strategy: curve.line for curve in curves.curves}
    assert lines["ddp"] == lines["pp=2:gpipe,mb=16"]
    assert lines["zero2"] != lines["ddp"]
    assert len({(curve.colour, curve.dash) for curve in curves.curves}) == len(curves.curves)
    assert loss_curves([], checked=2) is None


def test_meshes_show_every_rank_at_its_place(document: dict[str, Any]) -> None:
    meshes = {mesh.strategy: mesh for mesh in draw_meshes(document["results"])}
    assert set(meshes) == {"ddp", "zero2", "pp=2:gpipe,mb=16"}
    pipeline = meshes["pp=2:gpipe,mb=16"]
    assert pipeline.axes == "pipeline 2"
    assert [(cell.column, cell.row, cell.stages) for cell in pipeline.cells] == [(1, 1, "stage 0"), (2, 1, "stage 1")]
    assert "rank 1 (data 1): parameters 1.000 MiB" in meshes["ddp"].words


def test_every_text_is_escaped(document: dict[str, Any]) -> None:
    rows = [{**row, "strategy": ATTACK, "reason": ATTACK} for row in document["results"]]
    text = page({**document, "job": ATTACK, "note": ATTACK, "results": rows, "left_out": rows[:1]})
    assert "<script" not in text and text.count("&lt;script&gt;") > 10


def test_where_nothing_ran_the_page_says_so(document: dict[str, Any]) -> None:
    wrong = [row for row in document["results"] if row["status"] != "ok"]
    text = page({**document, "results": wrong, "references": []})
    assert "No strategy ran through" in text and "Rank 1 failed: not enough memory." in text
    assert "Time by cause" not in text


@pytest.mark.slow
def test_the_page_in_a_browser(document: dict[str, Any], tmp_path: Path) -> None:
    write_page(document, tmp_path / "compare.html")
    with open_browser() as browser:
        with visit(browser, (tmp_path / "compare.html").as_uri()) as shown:
            assert shown.locator(".answer > code").inner_text() == document["results"][0]["strategy"]
            bars = shown.locator(".bar.pair")
            assert bars.count() == 6
            bars.first.focus()
            tip = bars.first.locator(".tip")
            assert tip.is_visible() and "50.00 ms" in tip.inner_text()
            origins = [one.get_attribute("data-origin") for one in shown.locator(".origin").all()]
            assert origins == ["measured", "forecast"]
            passes = shown.locator(".origin[data-origin=measured] rect title").all_text_contents()
            assert sum(title.startswith(("Forward", "Backward")) for title in passes) == 4
            assert shown.locator(".curves polyline").count() == 4
            assert shown.locator(".mesh .cell").count() == 6
        for scheme in ("light", "dark"):
            options = {"viewport": {"width": 360, "height": 700}, "color_scheme": scheme}
            with visit(browser, (tmp_path / "compare.html").as_uri(), **options) as narrow:
                assert overflow(narrow) <= 0
                assert narrow.locator(".pair .measured").first.bounding_box()["width"] > 250
