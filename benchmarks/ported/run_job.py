"""Train a ported job on the batches of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from jobs import JOBS


def whole_batches(noted: list[dict[str, torch.Tensor]], passes: int) -> list[dict[str, torch.Tensor]]:
    """The batches of all backward passes of a step, together."""
    steps = [noted[first : first + passes] for first in range(0, len(noted), passes)]
    return [{name: torch.cat([one[name] for one in step]) for name in step[0]} for step in steps]


def run_job(name: str, strategy: str, batches: Path) -> dict[str, Any]:
    """The loss of every step."""
    ported = JOBS[name]()
    given = whole_batches(torch.load(batches), ported.passes)
    run = mw.setup(ported.job(given[0]), strategy, seed=ported.seed)
    return {"losses": [run.step(batch).loss for batch in given], "passes": ported.passes}
