"""Presets come described, and what is written down is what describing them finds."""

import subprocess
import sys

import pytest
import torch

from meshwright.api import described_presets as module
from meshwright.api.described_presets import PRECISION, describe_job
from meshwright.describe.model import describe
from meshwright.facts.costs import ModelCosts
from meshwright.jobs.presets import PRESETS
from meshwright.tracing.costs import measure_costs

HERE = ".".join(torch.__version__.split(".")[:2])
WRITTEN = (module.read_preset("gpt2") or {}).get("made_with", f"torch {HERE}").split(",")[0]
same_torch = pytest.mark.skipif(f"torch {HERE}" != WRITTEN, reason=f"presets were described with {WRITTEN}")

SAMPLE = ("gpt2", "bert-base", "qwen2.5-0.5b")


def test_every_preset_has_its_file_and_no_other() -> None:
    assert {path.name for path in module.FOLDER.iterdir()} == {f"{name}.json.gz" for name in PRESETS}


@same_torch
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_was_described_with_this_code(name: str) -> None:
    assert module._kept(name), f"{name} was described with other code; run python -m meshwright.api.described_presets"


@same_torch
@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.thorough) for name in PRESETS]
)
def test_what_is_written_down_is_what_is_found(name: str) -> None:
    kept = describe_job(f"preset:{name}")
    assert kept.facts == describe(kept.job)
    assert kept.costs == {(PRECISION, "none"): measure_costs(kept.job, kept.facts, PRECISION)}


@pytest.mark.parametrize("text", ["preset:gpt2", "preset:gpt2:seq=128"])
def test_another_make_or_other_options_are_described_anew(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if text == "preset:gpt2":
        monkeypatch.setattr(module, "made_with", lambda: "another PyTorch")
    found = describe_job(text)
    assert found.costs == {}
    assert found.facts == describe(found.job)


@same_torch
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_costs_are_written_and_read(recompute: str) -> None:
    costs = describe_job("preset:gpt2").costs[PRECISION, "none"].recomputed(recompute)
    assert ModelCosts.from_json(costs.to_json()) == costs


@same_torch
def test_a_fast_plan_of_a_preset_imports_neither_compiler_nor_dtensor() -> None:
    """They take twice the time of the search."""
    program = """
import sys
from meshwright.cli.main import main
sys.argv = ["meshwright", "plan", "preset:gpt2", "--on", "8xA100-40GB", "--fast", "--json"]
try:
    main()
finally:
    print(*(m for m in ("torch._dynamo", "sympy", "torch.distributed.tensor") if m in sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == ""
    assert '"plans"' in done.stdout
