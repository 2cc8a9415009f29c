"""Error bars: the table, what is read from it, and what a forecast says outside of all measured runs."""

import json
from pathlib import Path

import pytest

from meshwright.api.described_presets import describe_job
from meshwright.api.job_planner import Planner
from meshwright.facts.cluster import Cluster
from meshwright.facts.plan import Plan, show_plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.error_bars import (
    COVERAGE,
    LANGUAGE,
    OTHER,
    QUANTITIES,
    SCALES,
    TABLE,
    Scope,
    expected_error,
    model_of,
    read_bars,
    scope_of,
)
from meshwright.planner.search import MEASURED_BAR, consider

DATA = Path(__file__).parents[2] / "docs" / "data"

MADE_UP = {
    "devices": ["H100-80GB"],
    "most_nodes": {LANGUAGE: {"data": 16, "tp": 1}, OTHER: {"data": 1}},
    "cells": [
        {"grade": "account", "on": on, "model": model, "axes": axes, "nodes": nodes}
        | {name: {"bar": bar} for name, bar in zip(QUANTITIES, bars, strict=True) if bar}
        for on, model, axes, nodes, bars in (
            ("gpu", LANGUAGE, "data", 1, (0.1, 0.2)),
            ("gpu", LANGUAGE, "data", 16, (0.3, 0.4)),
            ("gpu", LANGUAGE, "tp", 1, (0.5, 0.6)),
            ("gpu", OTHER, "data", 1, (0.15, 0.65)),
            ("cpu", LANGUAGE, "data", 1, (None, 0.7)),
        )
    ],
}


def scope(words: str, nodes: int, device: str = "H100-80GB", model: str = LANGUAGE) -> Scope:
    return Scope(frozenset(words.split()), nodes, device, model)


@pytest.mark.parametrize(
    ("words", "nodes", "device", "memory", "time"),
    [
        ("", 1, "H100-80GB", 0.1, 0.2),
        ("", 3, "H100-80GB", 0.3, 0.4),  # no cell of 4 nodes: the next larger one
        ("", 64, "H100-80GB", 0.3, 0.4),  # none is larger: the widest of the smaller ones
        ("tp", 16, "H100-80GB", 0.5, 0.6),
        ("ep", 1, "H100-80GB", 0.5, 0.65),  # never measured: the widest of all
        ("", 1, "cpu", 0.1, 0.7),  # bytes were measured on GPUs only
    ],
)
def test_the_cell_that_resembles_a_forecast_most(
    words: str, nodes: int, device: str, memory: float, time: float
) -> None:
    assert read_bars(MADE_UP, "account", scope(words, nodes, device)).bar == {"memory": memory, "time": time}


@pytest.mark.parametrize(
    ("words", "nodes", "device", "memory", "time"),
    [
        ("", 1, "H100-80GB", 0.15, 0.65),
        ("", 16, "H100-80GB", 0.15, 0.65),  # no cell of its own on more nodes: the widest of its smaller ones
        ("tp", 1, "H100-80GB", 0.5, 0.65),  # language models' with these axes, or the widest of its own
        ("ep", 1, "H100-80GB", 0.5, 0.65),
        ("", 1, "cpu", 0.15, 0.7),  # CPU ranks were measured with language models only
    ],
)
def test_the_cell_that_resembles_a_forecast_of_a_model_of_no_language_most(
    words: str, nodes: int, device: str, memory: float, time: float
) -> None:
    assert read_bars(MADE_UP, "account", scope(words, nodes, device, OTHER)).bar == {"memory": memory, "time": time}


def test_a_forecast_outside_of_all_measured_runs_says_so() -> None:
    assert read_bars(MADE_UP, "account", scope("", 16)).untested == ()
    (device,) = read_bars(MADE_UP, "account", scope("", 1, "B200-180GB")).untested
    assert device == "No run on B200-180GB was compared with a forecast, only on H100-80GB."
    (scale,) = read_bars(MADE_UP, "account", scope("tp", 2)).untested
    assert scale == "No run with tp on more than 1 node was compared with a forecast."
    (axis,) = read_bars(MADE_UP, "account", scope("ep pp", 1)).untested
    assert axis == "No run with ep with pp was compared with a forecast."


def test_a_forecast_outside_of_the_runs_of_such_models_says_so() -> None:
    assert read_bars(MADE_UP, "account", scope("", 1, model=OTHER)).untested == ()
    (scale,) = read_bars(MADE_UP, "account", scope("", 2, model=OTHER)).untested
    assert scale == "Only language models with a data axis alone on more than 1 node were compared with a forecast."
    (axis,) = read_bars(MADE_UP, "account", scope("tp", 1, model=OTHER)).untested
    assert axis == "Only language models with tp were compared with a forecast."
    (neither,) = read_bars(MADE_UP, "account", scope("tp", 2, model=OTHER)).untested
    assert neither == "No run with tp on more than 1 node was compared with a forecast."


@pytest.mark.parametrize(("preset", "model"), [("gpt2-xl", LANGUAGE), ("bert-large", LANGUAGE), ("vit-large", OTHER)])
def test_a_language_model_ends_in_a_cross_entropy_over_a_vocabulary(preset: str, model: str) -> None:
    assert model_of(describe_job(f"preset:{preset}").facts) == model


def test_the_table_is_complete_and_its_bars_cover_held_out_runs() -> None:
    table = json.loads(TABLE.read_text())
    assert table["coverage"] == COVERAGE
    for grade in ("account", "trace"):
        known = [cell for cell in table["cells"] if cell["grade"] == grade and cell["on"] == "gpu"]
        assert all(any(quantity in cell for cell in known) for quantity in QUANTITIES)
    for cell in table["cells"]:
        assert cell["nodes"] in SCALES
        assert all(0 < cell[name]["bar"] < 1 and cell[name]["runs"] >= 10 for name in QUANTITIES if name in cell)
    for held in (table["held_out"], *table["held_out_by_model"].values()):
        assert all(abs(found["covered"] - COVERAGE) < 0.15 for of in held.values() for found in of.values())


def test_axes_of_one_rank_and_other_names_of_a_device_change_nothing() -> None:
    cluster = Cluster.parse("2x8xH100")
    found = scope_of(Strategy.parse("fsdp,bf16").axes, cluster, LANGUAGE)
    assert found == Scope(frozenset(), 2, "H100-80GB", LANGUAGE)
    assert scope_of(Strategy.parse("tp=8,pp=2:1f1b").axes, cluster, LANGUAGE).axes == "pp+tp"


def test_a_plan_carries_its_bar_and_what_was_not_tested() -> None:
    known = describe_job("preset:gpt2-xl")
    planner = Planner(known.job, known.facts, 64, costs=known.costs)
    planner.measure("bf16", "none")
    tested, strange = (
        consider(planner.context(Cluster.parse(on)), Strategy.parse("fsdp,bf16")) for on in ("8xH100", "8xB200")
    )
    assert tested.error_bar == expected_error("account", scope("", 1)).bar and tested.untested == ()
    assert "B200" in strange.untested[0]
    assert show_plan(strange)["untested"] == list(strange.untested)
    assert Plan.from_json(strange.to_json()).untested == strange.untested


def test_three_in_four_blind_forecasts_by_measured_kernels_are_within_their_bar() -> None:
    rows = json.loads((DATA / "unseen_scores.json").read_text())["rows"]
    off = [abs(row["errors"]["kernels"]) for row in rows if "kernels" in row["errors"]]
    assert sum(error <= MEASURED_BAR for error in off) >= COVERAGE * len(off)
    assert sum(error <= MEASURED_BAR - 0.002 for error in off) < COVERAGE * len(off)
