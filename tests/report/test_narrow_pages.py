"""Pages that name a strategy, in narrow windows: no term is broken, and no line is longer than the window."""

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import RenderableType

from meshwright.facts.finding import Finding
from meshwright.report.checkpoint import show_page
from meshwright.report.compare import comparison_page
from meshwright.report.explain import explain_page
from meshwright.report.layout import layout_page
from meshwright.report.plan import plan_page
from meshwright.report.preflight import findings_page
from meshwright.report.rehearse import rehearsal_page, tuning_page
from meshwright.report.sweep import sweep_page
from meshwright.report.tables import summary_page, verdict_page
from terminal_pages import LONG, broken_terms, plan, ranking, shown


def first_is_long() -> RenderableType:
    return plan_page(ranking() | {"plans": [plan(LONG, "because."), plan(LONG, "would cost 3%.")]})


def verdict() -> RenderableType:
    row = {"strategy": LONG, "equal": True, "status": "ok", "precision": "float64", "loss_max_rel": 1e-16}
    row |= {"grad_norm_max_rel": 1e-16, "grad_max_rel": 1e-15, "param_max_abs": 1e-16, "note": ""}
    return verdict_page([row])


def summary() -> RenderableType:
    names = ("resumed_at", "stopped", "out", "step_ms", "first_loss", "evaluation", "early_stop", "start_up_s")
    found: dict[str, Any] = {**dict.fromkeys(names), "strategy": LONG, "ranks": 128, "device": "cpu", "steps": 1}
    return summary_page(found | {"epochs": 0, "samples": 8, "seconds": 1.0, "peak_bytes": []})


def layout() -> RenderableType:
    layers = [{"module": "model.layers.*.self_attn.q_proj", "role": "column", "divides": "4 heads", "why": "asked"}]
    mesh = {"pipeline": 2, "data": 16, "tensor": 4}
    return layout_page({"strategy": LONG, "ranks": 128, "mesh": mesh, "tensor": layers})


def explanation() -> RenderableType:
    figures = {"job": "job.py", "cluster": "128xH100-80GB", "global_batch": 8, "summaries": [], "walks": []}
    return explain_page({**figures, "strategy": LONG, "forecast": {"step_ms": 3.0, "time": {"compute": 3.0}}})


def preflight() -> RenderableType:
    found = Finding(kind="tied-parameter", level="note", what="one parameter " * 9, do="Nothing.", under=())
    return findings_page({"job": "job.py", "strategy": LONG, "ranks": 128, "findings": [found.to_json()]})


def rehearsal() -> RenderableType:
    measured = {"peak_gib": 1.0, "reserved_gib": 1.0, "compute_ms": 3.0, "step_ms": 3.0, "memory": {}, "peak_at": None}
    figures = {"job": "job.py", "strategy": LONG, "global_batch": 8, "rank": 0, "world": 128, "device": "cpu"}
    figures |= {"status": "ok", "fits": False, "limit_gib": 2.0, "room_gib": -1.0, "roles": [], "notes": []}
    change = {"strategy": LONG, "changed": ["ac=selective"], "tried": [{"strategy": LONG, "status": "ok"}]}
    change |= {"rehearsal": {"room_gib": 1.0, "measured": measured}}
    errors = dict.fromkeys(("memory", "reserved", "time"), 0.1)
    return rehearsal_page({**figures, "measured": measured, "forecast": measured, "error": errors, "change": change})


def tuning() -> RenderableType:
    told = {"step_ms": 3.0, "reserved_gib": 1.0}
    trial = {"strategy": LONG, "fits": True, "step_ms": 3.0, "held_gib": 1.0, "forecast": told}
    figures = {"job": "job.py", "cluster": "128xH100-80GB", "global_batch": 8, "strategy": LONG}
    return tuning_page({**figures, "trials": [trial], "why": [f"{LONG}, the next, is 24% slower."]})


def checkpoint() -> RenderableType:
    figures = {"path": "run", "step": 1, "samples": 8, "seed": 0, "strategy": LONG, "ranks": 128, "made": {}}
    figures |= {"bytes": dict.fromkeys(("model", "optimizer", "rng"), 8), "parameters": 8, "trained": None}
    nothing = dict.fromkeys(("ema", "schedule", "hugging_face", "optimizer"))
    return show_page({**figures, **nothing, "tied": {}, "files": []})


def sweep() -> RenderableType:
    kinds = {"kind": "zero1+tp+pp", "tokens_per_s": 1e6, "samples_per_s": 1.0, "samples_per_s_per_device": 1.0}
    point = {"value": 8, "best_kind": "zero1+tp+pp", "kinds": [plan(LONG) | kinds], "refused": [], "candidates": 1}
    points = [point | {"value": 8 * 2**power} for power in range(8)]
    figures = {"job": "job.py", "cluster": "8xH100-80GB", "quantity": "link", "unit": "GB/s", "seconds": 1.0}
    return sweep_page({**figures, "points": points, "crossings": [], "advice": []})


def comparison() -> RenderableType:
    names = ("step_ms", "step_ms_low", "step_ms_high", "against_best", "tokens_per_s", "samples_per_s", "peak_mib")
    row = {**dict.fromkeys(names, 12345.6), "comm_share": 0.1, "comm_exposed": 0.1, "bubble": 0.1, "loss_equal": True}
    row |= {"strategy": LONG, "status": "ok", "reason": "", "forecast": {"step_ms": 1234.5, "peak_mib": 1234.5}}
    figures = {"job": "job.py", "ranks": 4, "device": "cpu", "global_batch": 8, "left_out": [], "note": ""}
    return comparison_page({**figures, "results": [row]})


PAGES = (
    first_is_long,
    verdict,
    summary,
    layout,
    explanation,
    preflight,
    rehearsal,
    tuning,
    checkpoint,
    sweep,
    comparison,
)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.__name__)
def test_no_term_is_broken(page: Callable[[], RenderableType], width: int) -> None:
    lines = shown(page(), width)
    assert broken_terms(lines) == set()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
