"""The pages of `plan` and `serve` as a person has them: in a real browser, with mouse and keyboard."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chromium import open_browser, overflow, visit
from meshwright.cli.main import app
from meshwright.facts.timeline import FORWARD, SEND, Timeline
from meshwright.report.charts import plotly_script
from meshwright.report.charts_timeline import piece_lines
from page_charts import point_at, tooltip, traces, wait_until_drawn
from serve_address import EXAMPLE, Address

pytestmark = pytest.mark.slow

WAYS = [pytest.param("light", 1200, marks=pytest.mark.thorough), ("dark", 360)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Timeline]:
    """The page of a plan, its document, and the timeline that it shows."""
    folder = tmp_path_factory.mktemp("plan")
    words = ["plan", str(EXAMPLE), "--on", "4xA100-40GB", "--fast", "--json"]
    words += ["--html", str(folder / "plan.html"), "--timeline", str(folder / "timeline.json")]
    document = json.loads(CliRunner().invoke(app, words).stdout)
    timeline = json.loads((folder / "timeline.json").read_text())["timeline"]
    return folder / "plan.html", document, Timeline.from_json(timeline)


@pytest.mark.parametrize(("scheme", "width"), WAYS)
def test_the_page_of_plan_fits_its_window(browser: Any, planned: Any, scheme: str, width: int) -> None:
    size = {"width": width, "height": 800}
    with visit(browser, planned[0].as_uri(), color_scheme=scheme, viewport=size) as page:
        wait_until_drawn(page)
        assert overflow(page) <= 0
        assert page.locator(".answer").bounding_box()["y"] < 200


@pytest.fixture(scope="module")
def shown(browser: Any, planned: Any) -> Iterator[Any]:
    """The page of a plan in a browser."""
    with visit(browser, planned[0].as_uri()) as page:
        wait_until_drawn(page)
        yield page


def test_the_page_of_plan_shows_the_right_figures(shown: Any, planned: Any) -> None:
    _, document, timeline = planned
    memory, time, steps = shown.locator(".chart").all()
    for chart, key in ((memory, "memory"), (time, "time")):
        found = traces(chart)
        for cause in {cause for plan in document["plans"] for cause in plan[key]}:
            expected = [plan[key][cause] for plan in document["plans"] if plan[key].get(cause, 0) > 0]
            assert [trace["x"] for trace in found if trace["name"] == cause] == ([expected] if expected else [])
        assert [name.text_content() for name in chart.locator(".annotation-text").all()[::2]] == [
            plan["strategy"] for plan in document["plans"]
        ]
    firsts = [plan["time"]["compute"] for plan in document["plans"]]
    drawn = [box.bounding_box()["width"] for box in time.locator(".barlayer .trace").first.locator("path").all()]
    assert drawn[0] / drawn[-1] == pytest.approx(firsts[0] / firsts[-1], rel=0.05)
    found = {trace["name"]: trace for trace in traces(steps)}
    for kind, trace in found.items():
        pieces = [piece for piece in timeline.pieces if piece.kind == kind]
        assert trace["base"] == pytest.approx([1e3 * piece.start for piece in pieces])
        assert trace["x"] == pytest.approx([1e3 * piece.seconds for piece in pieces])
    assert sum(len(trace["x"]) for trace in found.values()) == len(timeline.pieces)


def test_a_timeline_tells_its_figures_to_mouse_and_keyboard(shown: Any, planned: Any) -> None:
    timeline = planned[2]
    chart = shown.locator(".timeline .chart")
    first = next(piece for piece in timeline.of(0) if piece.kind == FORWARD)
    point_at(shown, chart.locator(".barlayer .point path").first)
    assert "".join(piece_lines(first)) in tooltip(shown, of="Forward of micro-batch 0")
    shown.mouse.move(0, 0)
    # By the keyboard alone: the legend's last entry is the stop before the chart.
    shown.locator(".timeline .legend button").last.focus()
    shown.keyboard.press("Tab")
    for key in ("ArrowRight", "ArrowRight"):
        shown.keyboard.press(key)
    second = sorted((piece for piece in timeline.of(0) if piece.kind != SEND), key=lambda piece: piece.start)[1]
    assert "".join(piece_lines(second)) in tooltip(shown, of=f"{1e3 * second.end:,.3f} ms")
    for key in ("ArrowDown", "ArrowDown"):  # past what the rank sends
        shown.keyboard.press(key)
    tooltip(shown, of="rank 1")
    whole = shown.evaluate("document.querySelector('.timeline .plot')._fullLayout.xaxis.range")
    shown.keyboard.press("+")
    shown.wait_for_function(
        """whole => {
        const [start, end] = document.querySelector('.timeline .plot')._fullLayout.xaxis.range;
        return Math.abs((end - start) / (whole[1] - whole[0]) - 0.5) < 1e-6 }""",
        arg=whole,
    )
    shown.keyboard.press("0")
    shown.wait_for_function(
        "whole => document.querySelector('.timeline .plot')._fullLayout.xaxis.range.join() === whole.join()",
        arg=whole,
    )
    shown.keyboard.press("Escape")
    shown.wait_for_function("() => !document.querySelector('.hoverlayer .hovertext')")


def first_strategy(page: Any) -> str:
    page.wait_for_selector("#answer[aria-busy=false] .answer > code", timeout=60_000)
    return str(page.locator(".answer > code").inner_text().replace("\n", ""))


def all_strategies(page: Any) -> list[str]:
    table = page.locator("[aria-label='All plans'] tbody th")
    return [text.replace("\n", "").strip() for text in table.all_inner_texts()]


def turned(page: Any, act: Any) -> None:
    """Do something with a knob and wait for its answer."""
    with page.expect_response("**/api/plan", timeout=60_000):
        act()
    page.wait_for_selector("#answer[aria-busy=false]", timeout=60_000)


@pytest.mark.thorough
def test_knobs_change_the_ranking_and_the_command_gives_it(browser: Any, address: Address) -> None:
    with visit(browser, address.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        first_strategy(page)
        turned(page, lambda: page.select_option("[name=model]", "preset:gpt2"))
        before = all_strategies(page)
        turned(page, lambda: page.fill("[name=devices]", "4"))
        turned(page, lambda: page.uncheck("[name=pipeline]"))
        turned(page, lambda: page.fill("[name=seq]", "512"))
        after = all_strategies(page)
        assert after and after != before and not any("pp=" in strategy for strategy in after)
        page.click("#copy")
        page.wait_for_selector("#copy:has-text('Copied')")
        command = page.evaluate("navigator.clipboard.readText()")
        assert command == page.locator("#command").inner_text()
        document = json.loads(CliRunner().invoke(app, [*shlex.split(command)[1:], "--json"]).stdout)
        assert [plan["strategy"] for plan in document["plans"]] == after
        wait_until_drawn(page)
        held = next(trace for trace in traces(page.locator(".chart").first) if trace["name"] == "parameters")
        assert held["x"] == [plan["memory"]["parameters"] for plan in document["plans"]]


@pytest.mark.thorough
def test_a_mistake_is_told_and_the_answer_stays(browser: Any, address: Address) -> None:
    with visit(browser, address.url) as page:
        before = first_strategy(page)
        turned(page, lambda: page.uncheck("[name=precision][value=bf16]"))
        assert "one or more of fp32, bf16, fp16" in page.locator("#status.error").inner_text()
        assert first_strategy(page) == before
        page.complaints.clear()  # a browser notes that an answer was no 200
        turned(page, lambda: page.check("[name=precision][value=bf16]"))
        assert page.locator("#status.error").count() == 0


@pytest.mark.thorough
def test_only_the_last_of_many_turns_is_shown(browser: Any, address: Address) -> None:
    with visit(browser, address.url) as page:
        first_strategy(page)
        for number in ("2", "3", "4"):
            with page.expect_request("**/api/plan"):
                page.fill("[name=devices]", number)
        page.wait_for_selector("#status:has-text('4xH100-80GB')", timeout=60_000)
        page.wait_for_selector("#answer[aria-busy=false]", timeout=60_000)
        assert "--on 4xH100-80GB" in page.locator("#command").inner_text()


@pytest.mark.parametrize(("scheme", "width"), WAYS)
def test_the_page_of_serve_fits_its_window(browser: Any, address: Address, scheme: str, width: int) -> None:
    with visit(browser, address.url, color_scheme=scheme, viewport={"width": width, "height": 800}) as page:
        first_strategy(page)
        turned(page, lambda: page.select_option("[name=model]", "preset:llama3-8b"))
        wait_until_drawn(page)
        assert overflow(page) <= 0
        assert page.locator(".timeline .barlayer .point").count() > 100


def test_plotly_comes_from_the_server_itself_and_is_asked_for_once(address: Address) -> None:
    connection = HTTPConnection("127.0.0.1", address.port, timeout=20)
    connection.request("GET", "/")
    (path,) = re.findall(r'<script src="([^"]+)"', connection.getresponse().read().decode())
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read().decode() == plotly_script()
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    connection.close()


def test_a_name_of_the_folder_is_no_markup(browser: Any, address: Address) -> None:
    """A config may lie under any name; the page lists it as text."""
    evil = address.folder / "<img src=x onerror=alert(1)>"
    evil.mkdir()
    (evil / "config.json").write_text('{"model_type": "gpt2"}')
    with visit(browser, address.url) as page:
        assert page.locator("option", has_text="<img src=x").count() == 1
        assert page.locator("img").count() == 0
