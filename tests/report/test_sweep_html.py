"""The page of a sweep: its lines, the marks where a kind overtakes another, and what it must not let through."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from chromium import open_browser, overflow, visit
from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan, Speed
from meshwright.facts.strategy import Strategy
from meshwright.facts.sweep import Point, Sweep
from meshwright.planner.crossings import Stop, lead_changes
from meshwright.report.charts_sweep import sweep_charts
from meshwright.report.sweep import crossing_sentences, drawn_kinds
from meshwright.report.sweep_html import page
from meshwright.units import GIB
from page_charts import figures, wait_until_drawn

graph_objects = pytest.importorskip("plotly.graph_objects", reason="pages need meshwright[pages]")

ATTACK = "\"'><script>alert(1)</script>&amp;%{x}"
STEPS: dict[int, dict[str, float]] = {
    8: {"ddp": 1.0, "fsdp": 1.2},
    16: {"fsdp": 0.5, "ddp": 0.6},
    32: {"fsdp": 0.3},
    64: {},
}


def point(devices: int, steps: dict[str, float]) -> Point:
    plans = {
        kind: Plan(
            strategy=Strategy.parse(f"{kind}={devices},bf16"),
            forecast=Forecast(memory={"activations": 20 * GIB}, time={"compute": step}),
            fits=True,
            speed=Speed(samples_per_s=64 / step, tokens_per_s_per_device=64_000 / step / devices, mfu=0.4),
        )
        for kind, step in steps.items()
    }
    cluster, best = f"{devices}xA100-40GB", next(iter(steps), None)
    return Point(
        value=devices, cluster=cluster, devices=devices, global_batch=64, room=37 * GIB, plans=plans, best=best
    )


def make_document(**changes: Any) -> dict[str, Any]:
    points = tuple(point(devices, steps) for devices, steps in STEPS.items())
    crossings = tuple(lead_changes([Stop(one.value, one.plans, one.best) for one in points]))
    swept = Sweep(
        job="job.py",
        cluster="8xA100-40GB",
        quantity="devices",
        unit="devices",
        points=points,
        crossings=tuple(crossings),
    )
    return swept.to_json() | changes


def test_a_line_for_each_kind_with_gaps_where_it_does_not_fit() -> None:
    speed, memory = figures(page(make_document()))
    assert [trace["name"] for trace in speed["data"]] == ["ddp", "fsdp"]
    assert speed["data"][0]["y"] == [8000, pytest.approx(64_000 / 0.6 / 16), None, None]
    assert speed["data"][1]["hovertext"][1] == "fsdp=16,bf16<br>16 devices: <b>8,000.0 tokens/s per device</b>"
    assert memory["data"][1]["y"] == [20, 20, 20, None]
    assert [shape["y0"] for shape in memory["layout"]["shapes"] if shape["xref"] == "paper"] == [37]


def test_crossings_are_marked_and_told() -> None:
    document = make_document()
    (told,) = crossing_sentences(document)
    assert told == "From 16 devices on, fsdp=16,bf16 is faster than ddp=16,bf16: its step takes 17% less time."
    for figure in figures(page(document)):
        assert [shape["x0"] for shape in figure["layout"]["shapes"] if shape["xref"] == "x"] == [16]
        assert [note["text"] for note in figure["layout"]["annotations"]] == ["fsdp"]
    assert told in html.unescape(page(document))


def test_plotly_knows_every_word() -> None:
    for _, plot in sweep_charts(make_document()):
        value = json.loads(plot.json)
        assert len(graph_objects.Figure(data=value["data"], layout=value["layout"]).data) == 2


def test_only_the_kinds_nearest_to_the_fastest_are_drawn() -> None:
    assert drawn_kinds(make_document(), 1) == ["ddp"]
    assert drawn_kinds(make_document()) == ["ddp", "fsdp"]


def test_every_text_is_escaped() -> None:
    document = make_document(job=ATTACK, cluster=ATTACK, advice=[ATTACK])
    for one in document["points"]:
        one |= {"cluster": ATTACK, "refused": [{"strategy": ATTACK, "reason": ATTACK}]}
        for plan in one["kinds"]:
            plan |= {"strategy": ATTACK, "kind": ATTACK}
    text = page(document)
    assert "<script>alert" not in text
    assert "%{x}" not in json.dumps(figures(text))


def test_nothing_fits_anywhere() -> None:
    points = [one | {"kinds": [], "best": None, "best_kind": None} for one in make_document()["points"]]
    text = page(make_document(points=points, crossings=[]))
    assert text.count("nothing fits") == 4 and "<script" not in text


@pytest.mark.thorough
def test_a_browser_draws_it(tmp_path: Path) -> None:
    file = tmp_path / "sweep.html"
    file.write_text(page(make_document()))
    with open_browser() as browser:
        for width in (1200, 380):
            with visit(browser, file.as_uri(), viewport={"width": width, "height": 800}) as shown:
                wait_until_drawn(shown)
                assert shown.locator(".scatterlayer .trace").count() == 4
                assert overflow(shown) <= 0
