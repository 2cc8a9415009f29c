"""Tables, CSV, trace events and the page of a comparison: right figures, nothing let through, nothing asked for."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chromium import open_browser, overflow, visit
from compare_outcomes import Starts, made_up
from meshwright.api import compare
from meshwright.api.compare import bubble_of, forecast_of, this_machine, with_forecast
from meshwright.api.job_planner import Planner
from meshwright.compare.compare import Compared
from meshwright.compare.start import LaunchOutcome
from meshwright.errors import OutputError
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import Timeline
from meshwright.probe.machine import local_cluster
from meshwright.report import colours
from meshwright.report.charts import scripts
from meshwright.report.charts_bars import bar_plot
from meshwright.report.compare import check_folders, comparison_page, csv_text
from meshwright.report.compare_curves import curves_plot, loss_curves
from meshwright.report.compare_html import memory_chart, page, time_chart, write_page
from meshwright.report.compare_mesh import draw_meshes
from meshwright.report.trace_events import trace_events, write_trace
from meshwright.units import MIB
from page_charts import figures, point_at, tooltip, traces, wait_until_drawn

pytest.importorskip("plotly", reason="pages need meshwright[pages]")

EMPTY: dict[str, Any] = {
    **{"job": "job.py", "ranks": 2, "device": "cpu", "cluster": "2xcpu", "global_batch": 16, "steps": 3, "rounds": 1},
    **{"note": "", "references": [], "left_out": [], "seconds": 1.0},
}
ATTACK = "\"'><script>alert(1)</script>&amp;"


@pytest.fixture(scope="module")
def compared() -> Compared:
    starts = Starts(zero1=LaunchOutcome(status="out of memory", reason="Rank 1 failed: not enough memory."))
    return made_up("ddp", "zero1", "zero2", "pp=2:gpipe,mb=16", starts=starts)


@pytest.fixture(scope="module")
def document(compared: Compared) -> dict[str, Any]:
    matrix, cluster = compared.matrix, local_cluster("cpu", devices=2)
    planner = Planner(matrix.job, matrix.facts, matrix.job.global_batch)
    rows = [with_forecast(row, planner, cluster, matrix.able[row["strategy"]]) for row in compared.rows]
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
    monkeypatch.setattr(compare, "count_cores", lambda: 2)
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


def test_a_narrow_window_gets_two_tables(document: dict[str, Any]) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_page(document))
    text = console.export_text()
    first, second = (line for line in text.splitlines() if line.startswith("│ zero2"))
    assert "200.0" in first and "0.50" in first and "DIFFERS" in first
    assert "40%" in second and "30%" in second
    assert "…" not in text


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
        plot = bar_plot(chart)
        lengths: dict[float, float] = {}
        for trace in plot.data:
            for x, y in zip(trace["x"], trace["y"], strict=True):
                lengths[y] = lengths.get(y, 0.0) + x
        told = [amount for row in rows for amount in (row[total], row["forecast"][total])]
        assert [length for _, length in sorted(lengths.items())] == pytest.approx(told)
        assert plot.layout["xaxis"]["range"] == pytest.approx([0, max(told)])


def test_the_same_cause_has_the_same_colour_measured_and_forecast(document: dict[str, Any]) -> None:
    rows = [row for row in document["results"] if row["status"] == "ok"]
    measured, forecast = memory_chart(rows).colours.values()
    assert measured["parameters"] == forecast["parameters"] and measured["optimizer"] == forecast["optimizer"]
    assert time_chart(rows).colours["measured"]["exposed communication"] == colours.TIME["data"]


def test_curves_that_are_equal_lie_on_each_other(document: dict[str, Any]) -> None:
    curves = loss_curves([row for row in document["results"] if row["losses"]], checked=2)
    assert curves is not None
    plot = curves_plot(curves)
    lines = {trace["name"]: (trace["x"], trace["y"]) for trace in plot.data}
    assert lines["ddp"] == lines["pp=2:gpipe,mb=16"]
    assert lines["zero2"] != lines["ddp"]
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in plot.data}) == len(plot.data)
    assert [shape["x0"] for shape in plot.layout["shapes"]] == [2.5]
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
    opened = re.findall(r"<script[^>]*>", text)
    assert opened == ['<script type="application/json">'] * (len(opened) - 2) + ["<script>"] * 2
    assert "alert(1)" not in "".join(scripts()) and text.count("&lt;script&gt;") > 10
    assert all(ATTACK in html.unescape(figure["data"][0]["hovertext"][0]) for figure in figures(text)[:3])


def test_where_nothing_ran_the_page_says_so(document: dict[str, Any]) -> None:
    wrong = [row for row in document["results"] if row["status"] != "ok"]
    text = page({**document, "results": wrong, "references": []})
    assert "Every strategy failed" in text and "Rank 1 failed: not enough memory." in text
    assert "Time by cause" not in text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def shown(browser: Any, document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page in a browser; whoever turns something turns it back."""
    path = tmp_path_factory.mktemp("page") / "compare.html"
    write_page(document, path)
    with visit(browser, path.as_uri(), color_scheme="light") as page:
        wait_until_drawn(page)
        yield page


@pytest.mark.slow
def test_the_page_in_a_browser(shown: Any, document: dict[str, Any]) -> None:
    rows = [row for row in document["results"] if row["status"] == "ok"]
    assert shown.locator(".answer > code").inner_text() == rows[0]["strategy"]
    time, memory, losses, measured, forecast = shown.locator(".chart").all()
    for chart, key in ((time, "time"), (memory, "memory")):
        found = {trace["name"]: trace for trace in traces(chart)}
        for kind, held in (("measured", rows), ("forecast", [row["forecast"] for row in rows])):
            for cause in {cause for one in held for cause, amount in one[key].items() if amount > 0}:
                expected = [one[key][cause] for one in held if one[key].get(cause, 0) > 0]
                assert found[f"{kind}: {cause}"]["x"] == expected
    assert [trace["y"] for trace in traces(losses)] == [
        row["losses"] for row in (*rows, *document["references"]) if row["status"] == "ok"
    ]
    passes = {trace["name"]: trace for trace in traces(measured)}
    assert len(passes["forward"]["x"]) + len(passes["backward"]["x"]) == 4
    assert passes["forward"]["text"] == ["0", "0"]
    told = next(Timeline.from_json(row["forecast_timeline"]) for row in rows if row["forecast_timeline"])
    assert sum(len(trace["x"]) for trace in traces(forecast)) == len(told.pieces)
    assert shown.locator(".mesh .cell").count() == 6


def wait_for_no_tooltip(page: Any) -> None:
    page.wait_for_function("() => !document.querySelector('.hoverlayer .hovertext')")


@pytest.mark.slow
def test_bars_and_curves_tell_their_figures_to_mouse_and_keyboard(shown: Any) -> None:
    time, _, losses = shown.locator(".chart").all()[:3]
    point_at(shown, time.locator(".barlayer .point path").first)
    assert "compute 50.00 ms" in tooltip(shown, of="50.0% of measured 100 ms")
    shown.mouse.move(0, 0)
    wait_for_no_tooltip(shown)
    time.focus()
    for key, words in (("ArrowRight", "compute 50.00 ms"), ("ArrowRight", "exposed communication 30.00 ms")):
        shown.keyboard.press(key)
        assert words in tooltip(shown, of=words)
    for key, words in (("ArrowLeft", "compute 50.00 ms"), ("ArrowDown", "of forecast")):
        shown.keyboard.press(key)
        assert "compute" in tooltip(shown, of=words)
    assert "of forecast" in time.locator("xpath=..").locator(".said").inner_text()
    shown.keyboard.press("Escape")
    wait_for_no_tooltip(shown)
    losses.focus()
    for key in ("ArrowRight", "ArrowRight"):
        shown.keyboard.press(key)
    assert "loss 0.900" in tooltip(shown, of="step 2")
    shown.keyboard.press("Tab")
    wait_for_no_tooltip(shown)


@pytest.mark.slow
def test_a_click_in_the_legend_hides_a_curve_and_the_next_shows_it(shown: Any) -> None:
    losses = shown.locator("figure").nth(2)
    button = losses.locator(".legend button").nth(1)
    for expected in (False, True):
        button.focus()
        shown.keyboard.press("Enter")
        shown.wait_for_function(
            "expected => document.querySelectorAll('.plot')[2]._fullData[1].visible === expected", arg=expected
        )
        assert button.get_attribute("aria-pressed") == str(expected).lower()
        assert losses.locator(".scatterlayer .trace").count() == 3 + expected


@pytest.mark.slow
def test_charts_follow_the_window_and_its_colours(shown: Any) -> None:
    chart = shown.locator(".chart").first
    assert traces(chart)[0]["colour"] == "#0072b2"
    shown.emulate_media(color_scheme="dark")
    shown.wait_for_function("() => document.querySelector('.plot')._fullData[0].marker.color === '#2f8fd0'")
    assert shown.evaluate("document.querySelector('.plot')._fullLayout.font.color") == "#a3adb8"
    shown.set_viewport_size({"width": 360, "height": 700})
    wait_until_drawn(shown)
    assert overflow(shown) <= 0
    assert 250 < chart.locator(".main-svg").first.bounding_box()["width"] <= 360
    shown.set_viewport_size({"width": 1200, "height": 900})
    shown.emulate_media(color_scheme="light")
    wait_until_drawn(shown)


@pytest.mark.slow
def test_a_hostile_name_in_a_narrow_window(browser: Any, document: dict[str, Any], tmp_path: Path) -> None:
    link = "<a href='https://evil.example'>here</a></script><script>window.hit = 1</script>,$x$,%{x}"
    rows = [{**row, "strategy": f"{link},{number}"} for number, row in enumerate(document["results"])]
    write_page({**document, "results": rows}, tmp_path / "compare.html")
    options = {"viewport": {"width": 360, "height": 700}, "color_scheme": "dark"}
    with visit(browser, (tmp_path / "compare.html").as_uri(), **options) as narrow:
        wait_until_drawn(narrow)
        assert overflow(narrow) <= 0
        assert narrow.locator(".annotation-text").first.text_content() == f"{link},0"
        narrow.locator(".chart").first.focus()
        narrow.keyboard.press("ArrowRight")
        assert link in tooltip(narrow, of="compute")
        assert narrow.locator(".said").first.text_content().startswith(link.split(",")[0])
        assert narrow.locator("a[href]").count() == 0 and narrow.locator("svg a").count() == 0
        boxes = [name.bounding_box() for name in narrow.locator(".annotation-text").all()]
        assert all(box["x"] >= 0 and box["x"] < 360 for box in boxes)
        assert narrow.evaluate("window.hit") is None
