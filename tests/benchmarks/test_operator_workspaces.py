"""What an H200 allocated for single operators, beside what a trace adds for them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import operator_workspaces_gpu as bench

HELD = {row["case"]: row["held"] for row in json.loads(bench.RESULTS.read_text())["rows"] if "held" in row}
CASES = [case for case in bench.cases() if case.name in HELD]
UNKNOWN = (
    "1000000 x 64",
    "sort, long rows",
    "sort, one row",
    "multinomial",
    "r2c 1021",
    "c2r 1021",
    "batch norm by cuDNN, channels last",
)
"""Those that docs/tracing.md lists as not seen."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_operator_takes_what_the_gpu_allocated(case: bench.Call) -> None:
    near = abs(bench.rule(case) - HELD[case.name]) <= bench.NEAR
    assert near != any(word in case.name for word in UNKNOWN)


def test_nearly_all_cases_were_measured() -> None:
    assert len(CASES) >= 220
