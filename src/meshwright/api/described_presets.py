"""Precomputed descriptions of the presets, so that planning one starts without importing PyTorch's compiler.

Why precomputed: describing a model builds its optimizer, which imports PyTorch's compiler, and that takes longer than
searching all strategies. Each file records the PyTorch release and the code that made it. If either has changed, or if
the preset has options, the model is described again. After changing that code, run `python -m
meshwright.api.described_presets`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from meshwright.describe.model import describe
from meshwright.facts.costs import ModelCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.jobs.load import load_job
from meshwright.jobs.presets import PRESETS
from meshwright.tracing.costs import measure_costs

PACKAGE = Path(__file__).parents[1]
FOLDER = PACKAGE / "presets"
PRECISION = "bf16"
"""The precision whose costs are stored; other precisions are traced on demand."""
CODE = (
    *("jobs", "recording"),
    *("describe", "facts/costs.py", "facts/job.py", "facts/model.py", "facts/tensor_plan.py", "assemble/precision.py"),
    *("tracing/costs.py", "tracing/unit_recorder.py", "tracing/meter.py", "tracing/element_steps.py"),
    *("tracing/workspaces.py", "tracing/convolutions.py", "tracing/reductions.py"),
)
"""The files of this package that a description depends on."""


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """A job and what is known about its model."""

    job: Job
    facts: ModelFacts
    costs: dict[tuple[str, str], ModelCosts]
    """Costs known so far, by precision and activation checkpointing."""


def describe_job(text: str) -> JobDescription:
    """Load a job as written on the command line, and look up or compute its model's description."""
    job = load_job(text)
    kept = _kept(text.removeprefix("preset:")) if text.startswith("preset:") else None
    if kept is None:
        return JobDescription(job=job, facts=describe(job), costs={})
    costs = ModelCosts.from_json(kept["costs"])
    facts = ModelFacts.from_json(kept["facts"])
    return JobDescription(job=job, facts=facts, costs={(costs.precision, costs.recompute): costs})


def write_preset(name: str) -> Path:
    """Describe a preset and store the result."""
    job = load_job(f"preset:{name}")
    facts = describe(job)
    costs = measure_costs(job, facts, PRECISION)
    document = {"made_with": made_with(), "facts": facts.to_json(), "costs": costs.to_json()}
    path = FOLDER / f"{name}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    return path


@cache
def made_with() -> str:
    """The PyTorch release and a digest of the code that makes descriptions."""
    digest = hashlib.sha256()
    for part in CODE:
        for path in sorted((PACKAGE / part).rglob("*.py")) or [PACKAGE / part]:
            digest.update(path.read_bytes())
    release = ".".join(torch.__version__.split(".")[:2])
    return f"torch {release}, code {digest.hexdigest()[:16]}"


def read_preset(name: str) -> dict[str, Any] | None:
    """The stored description of a preset, whichever PyTorch and code made it."""
    path = FOLDER / f"{name}.json.gz"
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes())) if path.is_file() else {}
    return document or None


def _kept(name: str) -> dict[str, Any] | None:
    """The stored description, if the current PyTorch and code made it."""
    document = read_preset(name) if name in PRESETS else None
    return document if document and document["made_with"] == made_with() else None


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for preset in PRESETS:
        print(write_preset(preset).name)
