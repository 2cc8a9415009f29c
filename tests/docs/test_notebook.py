"""The notebook runs from top to bottom, and values show themselves."""

import json
from pathlib import Path

import pytest

from meshwright import Strategy
from meshwright.api.on_ranks import on_ranks, pickled
from meshwright.errors import BadInput, RankFailed
from meshwright.facts.forecast import Forecast
from meshwright.facts.layout import Layout
from meshwright.facts.plan import Plan, Ranking, Refusal
from meshwright.facts.timeline import FORWARD, Piece, Timeline, with_idle
from page_blocks import ROOT, environment

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def test_it_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.thorough
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the notebook is run by nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    assert "Recommended: " in shown[0]
    assert len(shown) == 4  # a ranking, a strategy, a layout, a timeline
    assert all(("<table" in one) or ("<svg" in one) or ("<code" in one) for one in shown)


def test_a_strategy_breaks_between_terms_only() -> None:
    shown = Strategy.parse("fsdp,tp=2,pp=2:interleaved")._repr_html_()
    assert shown.count("<code") == 3
    assert "nowrap" in shown


def test_a_ranking_shows_the_recommendation_and_escapes_all_text() -> None:
    forecast = Forecast(memory={"parameters": 3 << 30}, time={"compute": 0.5, "data": 0.1})
    plan = Plan(strategy=Strategy.parse("ddp"), forecast=forecast, fits=True, why=("<b>because</b>",))
    refused = (Refusal(strategy="fsdp", reason="no"),)
    ranking = Ranking(job="<script>", cluster="8xA100", plans=(plan,), refused=refused, candidates=2)
    shown = ranking._repr_html_()
    assert "Recommended: ddp" in shown
    assert "<script>" not in shown and "<b>because" not in shown
    assert "600 ms" in shown and "3.0 GiB" in shown
    assert "&lt;b&gt;because" in plan._repr_html_()


def test_a_timeline_has_a_lane_for_each_rank() -> None:
    pieces = [Piece(rank=rank, kind=FORWARD, start=rank, end=rank + 1) for rank in range(2)]
    timeline = Timeline(strategy="pp=2:1f1b", schedule="1f1b", ranks=2, micro_batches=1, pieces=with_idle(pieces, 2))
    shown = timeline._repr_html_()
    assert shown.count(">rank ") == 2
    assert shown.count("<rect") == 2


def test_a_layout_shows_its_mesh_and_tables() -> None:
    units = [{"unit": f"layers.{number}", "parameters": 10, "names": ["a", "b"]} for number in range(20)]
    layout = Layout({"strategy": "fsdp=2", "ranks": 2, "mesh": {"data": 2}, "units": units})
    assert str(layout) == "fsdp=2 on 2 ranks: data 2"
    assert "layers.11" in layout._repr_html_() and "... and 8 more" in layout._repr_html_()


@pytest.mark.slow
def test_the_error_of_a_rank_is_raised_here() -> None:
    def fail() -> None:
        raise ValueError("no such thing")

    with pytest.raises(RankFailed, match="no such thing"):
        on_ranks(2, fail)


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(BadInput, match="number of ranks first"):
        on_ranks(print, 2)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="needs a function"):
        on_ranks(2, "train")  # type: ignore[arg-type]


def test_without_cloudpickle_a_notebook_s_function_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None: ...

    train.__module__ = "__main__"
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises(BadInput, match="train is defined in a notebook"):
        pickled(train, (), {})
    assert pickled(len, ([],), {})
