"""Presets come described: what a plan asks of one was found when this package was made.

Describing a model needs PyTorch's compiler, because its optimizers do, and that takes longer to import than it takes to
search all strategies. Each file says with which PyTorch and which code it was made. Where that is another, and for
presets with options, the model is described anew. Who changes that code runs `python -m meshwright.described`.
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

from meshwright.describe.jobfile import load_job
from meshwright.describe.model import describe
from meshwright.describe.presets import PRESETS
from meshwright.facts.costs import ModelCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.tracing.costs import measure_costs

PACKAGE = Path(__file__).parent
FOLDER = PACKAGE / "presets"
PRECISION = "bf16"
"""The one in which costs are kept; those of others are traced when somebody asks for them."""
CODE = (
    *("describe", "facts/costs.py", "facts/job.py", "facts/model.py", "facts/tensor.py", "tracing/costs.py"),
    *("tracing/meter.py", "build/precision.py", "strategies/forward.py"),
)
"""What a description depends on, of this package."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A job with what is known of its model."""

    job: Job
    facts: ModelFacts
    costs: dict[tuple[str, str], ModelCosts]
    """By precision and recomputing; those that are known already."""


def described(text: str) -> Described:
    """A job as it is written on the command line; its model's description is looked up, or made."""
    job = load_job(text)
    kept = _kept(text.removeprefix("preset:")) if text.startswith("preset:") else None
    if kept is None:
        return Described(job=job, facts=describe(job), costs={})
    costs = ModelCosts.from_json(kept["costs"])
    facts = ModelFacts.from_json(kept["facts"])
    return Described(job=job, facts=facts, costs={(costs.precision, costs.recompute): costs})


def keep(name: str) -> Path:
    """Describe a preset, and write down what was found."""
    job = load_job(f"preset:{name}")
    facts = describe(job)
    costs = measure_costs(job, facts, PRECISION)
    document = {"made_with": made_with(), "facts": facts.to_json(), "costs": costs.to_json()}
    path = FOLDER / f"{name}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    return path


@cache
def made_with() -> str:
    """Which PyTorch and which code."""
    digest = hashlib.sha256()
    for part in CODE:
        for path in sorted((PACKAGE / part).rglob("*.py")) or [PACKAGE / part]:
            digest.update(path.read_bytes())
    release = ".".join(torch.__version__.split(".")[:2])
    return f"torch {release}, code {digest.hexdigest()[:16]}"


def written(name: str) -> dict[str, Any] | None:
    """What was written down of a preset, with whatever."""
    path = FOLDER / f"{name}.json.gz"
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes())) if path.is_file() else {}
    return document or None


def _kept(name: str) -> dict[str, Any] | None:
    """The same if it holds here and now."""
    document = written(name) if name in PRESETS else None
    return document if document and document["made_with"] == made_with() else None


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for preset in PRESETS:
        print(keep(preset).name)
