"""Figures of pages: plotly takes them, nobody's names get out of them, and without plotly it is said in time."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import app
from meshwright.cli.outcome import main_with_exit_codes
from meshwright.errors import BadInput
from meshwright.facts.timeline import FORWARD, IDLE, SEND, Piece, Timeline
from meshwright.report import charts, colours
from meshwright.report.bars import Chart, Lane, Quantity
from meshwright.report.charts import Plot, folded, plotly_script, policy
from meshwright.report.charts_bars import NAME, THICKNESS, bar_plot
from meshwright.report.charts_timeline import timeline_plot
from meshwright.report.compare_curves import curves_plot, loss_curves

graph_objects = pytest.importorskip("plotly.graph_objects", reason="pages need meshwright[pages]")

ATTACK = "</script><script>alert(1)</script><a href='http://evil.example'>&lt;b&gt;%{x}</a>"
GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
PIECES = (
    Piece(rank=0, kind=FORWARD, start=0.0, end=0.002, stage=0, micro_batch=0),
    Piece(rank=0, kind=SEND, start=0.002, end=0.003, stage=0, micro_batch=0, to=1),
    Piece(rank=0, kind=IDLE, start=0.002, end=0.004),
    Piece(rank=1, kind=IDLE, start=0.0, end=0.003),
    Piece(rank=1, kind=FORWARD, start=0.003, end=0.004, stage=1, micro_batch=0),
)


def bars(name: str) -> Plot:
    quantity = Quantity(key="memory", unit="GiB", colours=colours.MEMORY, total="{:.1f} GiB".format, exact=str)
    both = quantity.bar({"parameters": 1.0, name: 2.0}, 3.0), quantity.bar({"parameters": 4.0}, 4.0)
    lane = Lane(strategy=name, total="3.0 GiB", bars=dict(zip(("measured", "forecast"), both, strict=True)))
    kinds = {kind: quantity.colours_of([bar]) for kind, bar in lane.bars.items()}
    return bar_plot(Chart(title="Memory", note="", unit="GiB", lanes=(lane, lane), colours=kinds, limit=3.5))


def curves(name: str) -> Plot:
    found = loss_curves([{"strategy": name, "losses": [2.0, None, 1.0]}], checked=2)
    assert found is not None
    return curves_plot(found)


def steps(name: str, drawn: int = 100) -> Plot:
    found = Timeline(strategy=name, schedule="1f1b", ranks=2, micro_batches=1, pieces=PIECES)
    return timeline_plot(found, drawn)


@pytest.mark.parametrize("plot", [bars("ddp"), curves("ddp"), steps("pp=2"), steps("pp=2", drawn=2)])
def test_plotly_knows_every_word_of_a_figure(plot: Plot) -> None:
    value = json.loads(plot.json)
    figure = graph_objects.Figure(data=value["data"], layout=value["layout"])
    assert len(figure.data) == len(plot.data) > 0
    assert {number for _, keys in plot.legends for key in keys for number in key.traces} == set(range(len(plot.data)))


def test_plotly_would_complain_of_another_word() -> None:
    plot = bars("ddp")
    with pytest.raises(ValueError, match="Invalid property"):
        graph_objects.Figure(data=plot.data, layout={**plot.layout, "heigth": 1})


@pytest.mark.parametrize("make", [bars, curves, steps])
def test_a_name_stays_inside_its_figure(make) -> None:
    plot = make(ATTACK)
    assert not set("<>&") & set(plot.json)
    value = json.loads(plot.json)
    shown = [text for trace in value["data"] for text in (trace["name"], *trace["hovertext"], *trace.get("text", []))]
    shown += [annotation["text"] for annotation in value["layout"].get("annotations", [])]
    for text in shown:  # plotly reads a little HTML in texts, and these hold none but our own
        assert "<" not in text.replace("<br>", "").replace("<b>", "").replace("</b>", "") and "%{" not in text
    assert all("hovertemplate" not in trace and "texttemplate" not in trace for trace in value["data"])


def test_bars_lie_below_their_names_and_do_not_meet() -> None:
    plot = bars("ddp")
    spans = sorted({(y - trace["width"] / 2, y + trace["width"] / 2) for trace in plot.data for y in trace["y"]})
    names = sorted(note["y"] for note in plot.layout["annotations"] if note["name"] == "strategy")
    assert [end - start for start, end in spans] == [*THICKNESS, *THICKNESS]
    (a, b), (c, d), (e, _), _ = spans
    assert names[0] <= a < b < c < d < names[1] - NAME + 1 < names[1] <= e
    assert plot.layout["xaxis"]["range"] == [0, 4.0]


def test_long_names_break_between_terms() -> None:
    assert folded("fsdp=4,pp=2:1f1b,bf16", 12) == "fsdp=4,<br>pp=2:1f1b,<br>bf16"
    assert folded("ddp,a<b") == "ddp,a&lt;b"


def test_a_policy_lets_only_these_scripts_run() -> None:
    digest = base64.b64encode(hashlib.sha256(b"draw()").digest()).decode()
    words = policy(["draw()"])
    assert words.split("; ")[:2] == ["default-src 'none'", f"script-src 'sha256-{digest}'"]
    assert "script-src" not in policy([])
    assert "unsafe-eval" not in words and "http" not in words


def test_plotly_s_script_cannot_end_its_element() -> None:
    assert len(plotly_script()) > 1_000_000
    assert "</script" not in plotly_script()


@pytest.mark.parametrize(
    "words",
    [
        ("plan", GPT, "--on", "4xA100-40GB", "--html", "plan.html"),
        ("plan", GPT, "--on", "4xA100-40GB", "--timeline", "timeline.html"),
        ("compare", GPT, "--ranks", "2", "--html", "compare.html"),
        ("serve", "--port", "0"),
    ],
)
def test_without_plotly_it_is_said_before_anything_starts(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*args: object, **named: object) -> None:
        raise AssertionError("the work was begun")

    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "plotly", None)
    for function in ("api.job_planner.open_planner", "api.compare.compare_command", "serve.server.make_models"):
        monkeypatch.setattr(f"meshwright.{function}", started)
    monkeypatch.setattr(sys, "argv", ["meshwright", *words])
    assert main_with_exit_codes(app) == 2
    said = capsys.readouterr().err
    assert "needs the package plotly, which is not installed" in said
    assert "pip install 'meshwright[" in said and said.count("\n") == 1


def test_data_needs_no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace events and figures are plain data; only a page carries plotly's script."""
    from meshwright.report.timeline import check_ending

    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    check_ending(Path("timeline.json"))
    assert bars("ddp").json
    plotly_script.cache_clear()
    with pytest.raises(BadInput, match="A page with charts needs the package plotly"):
        plotly_script()
