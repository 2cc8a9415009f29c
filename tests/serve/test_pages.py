"""The pages of `plan` and `serve` as a person has them: in a real browser, with mouse and keyboard."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chromium import open_browser, overflow, visit
from meshwright.cli.main import app
from meshwright.facts.timeline import Timeline
from meshwright.report.timeline import draw
from serve_address import EXAMPLE, Address

pytestmark = pytest.mark.slow

WAYS = [("light", 1200), ("dark", 1200), ("light", 360)]


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
        assert overflow(page) <= 0
        assert page.locator(".answer").bounding_box()["y"] < 200


def test_the_page_of_plan_shows_the_right_figures(browser: Any, planned: Any) -> None:
    path, document, timeline = planned
    with visit(browser, path.as_uri()) as page:
        memory, time = page.locator("section:has(.bars):not(.timeline)").all()
        for section, key, unit in ((memory, "memory", "GiB"), (time, "time", "ms")):
            bars = section.locator(".bar").all()
            assert len(bars) == len(document["plans"])
            for bar, plan in zip(bars, document["plans"], strict=True):
                label = bar.get_attribute("aria-label")
                assert label.startswith(plan["strategy"] + ":")
                for cause, amount in plan[key].items():
                    shown = f"{amount:,.3f}" if unit == "GiB" else f"{amount:,.2f}"
                    assert amount <= 0 or f"{cause} {shown} {unit}" in label
        track = time.locator(".track").first
        drawn = sum(part.bounding_box()["width"] for part in track.locator("i").all())
        steps = [plan["step_ms"] for plan in document["plans"]]
        assert drawn / track.bounding_box()["width"] == pytest.approx(steps[0] / max(steps), rel=0.02)
        lanes = page.locator(".timeline .lane[tabindex]").all()
        assert [lane.get_attribute("aria-label") for lane in lanes] == [row.words for row in draw(timeline).rows]
        boxes = lanes[-1].locator("rect")
        assert boxes.count() == len(timeline.of(timeline.ranks - 1))
        last = timeline.of(timeline.ranks - 1)[0]
        picture, box = lanes[-1].locator("svg").bounding_box(), boxes.first.bounding_box()
        assert box["width"] / picture["width"] == pytest.approx(last.seconds / timeline.total, abs=0.005)


def test_a_row_tells_its_figures_to_the_keyboard(browser: Any, planned: Any) -> None:
    with visit(browser, planned[0].as_uri()) as page:
        lane = page.locator(".timeline .lane[tabindex]").first
        assert not lane.locator(".tip").is_visible()
        page.locator("section:has(.bars):not(.timeline) .bar").last.focus()
        page.keyboard.press("Tab")
        assert lane.locator(".tip").is_visible()
        assert "idle" in lane.locator(".tip").inner_text()


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
        label = page.locator(".bar").first.get_attribute("aria-label")
        assert f"{document['plans'][0]['memory']['parameters']:,.3f} GiB" in label


def test_a_mistake_is_told_and_the_answer_stays(browser: Any, address: Address) -> None:
    with visit(browser, address.url) as page:
        before = first_strategy(page)
        turned(page, lambda: page.uncheck("[name=precision][value=bf16]"))
        assert "one or more of fp32, bf16, fp16" in page.locator("#status.error").inner_text()
        assert first_strategy(page) == before
        page.complaints.clear()  # a browser notes that an answer was no 200
        turned(page, lambda: page.check("[name=precision][value=bf16]"))
        assert page.locator("#status.error").count() == 0


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
        assert overflow(page) <= 0
        assert page.locator(".timeline").count() == 1


def test_a_name_of_the_folder_is_no_markup(browser: Any, address: Address) -> None:
    """A config may lie under any name; the page lists it as text."""
    evil = address.folder / "<img src=x onerror=alert(1)>"
    evil.mkdir()
    (evil / "config.json").write_text('{"model_type": "gpt2"}')
    with visit(browser, address.url) as page:
        assert page.locator("option", has_text="<img src=x").count() == 1
        assert page.locator("img").count() == 0
