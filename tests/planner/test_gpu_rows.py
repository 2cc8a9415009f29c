"""Forecasts against a real GPU: docs/data/plan_gpu.json holds what one H200 measured, and a CPU foretells it here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "docs" / "data" / "plan_gpu.json").read_text())["rows"]
TRACED = [
    "llama3.2-1b:seq=2048,batch=8 single,bf16,ac=full",
    "llama3.2-1b:seq=2048,batch=64 fsdp,bf16",
    "llama3.2-3b:seq=2048,batch=8 tp=8,bf16",
    "llama3.2-3b:seq=2048,batch=16 pp=4:1f1b,bf16,mb=2",
]
"""Those that are traced here. All are by `benchmarks/plan_gpu.py score`, whose table is in docs/planner.md."""
COMPILED = ["llama3-8b:seq=4096,batch=8 fsdp,bf16,compile"]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import plan_gpu

        yield plan_gpu
        sys.modules.pop("plan_gpu", None)


def row_of(name: str) -> dict[str, Any]:
    return next(row for row in ROWS if f"{row['job'].removeprefix('preset:')} {row['strategy']}" == name)


def test_the_sweep_is_whole() -> None:
    assert len(ROWS) >= 30 and not any("error" in row for row in ROWS)
    terms = {term.split("=")[0] for row in ROWS for term in row["strategy"].split(",")}
    assert {"single", "ddp", "zero1", "fsdp", "fsdp:grad-op", "hsdp", "tp", "pp", "ac", "compile"} <= terms


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS[::8], pytest.param(ROWS, marks=pytest.mark.thorough)], ids=["some", "all"])
def test_account_and_time(bench: ModuleType, rows: list[dict[str, Any]]) -> None:
    found = [bench.errors_of(row, bench.account_for(row)) for row in rows]
    assert mean(abs(errors["account"]) for errors in found) < 0.04
    assert mean(abs(errors["time"]) for errors in found) < 0.10


@pytest.mark.slow
@pytest.mark.thorough
def test_traced_memory(bench: ModuleType) -> None:
    found = [bench.errors_of(row, bench.trace(row)) for row in map(row_of, TRACED)]
    assert mean(abs(errors["traced"]) for errors in found) < 0.007
    assert min(errors["traced"] for errors in found) > -0.03
    assert mean(abs(errors["reserved"]) for errors in found) < 0.05


@pytest.mark.slow
@pytest.mark.thorough
def test_traced_memory_of_compiled_models(bench: ModuleType) -> None:
    found = [bench.errors_of(row, bench.trace(row))["traced"] for row in map(row_of, COMPILED)]
    assert mean(map(abs, found)) < 0.03 and min(found) > -0.03
