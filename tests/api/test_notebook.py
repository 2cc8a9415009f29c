"""Looking at a job leaves the process that asks as it was."""

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import meshwright as mw
import meshwright.api.notebook  # rich, which it imports, draws a random number for each style
from minimal import WIDTH, Blocks, make_job

CLUSTER = "4xA100-40GB"


def state() -> dict[str, Any]:
    """What a script would notice, or would train differently with."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "tracebacks": sys.excepthook,
        "profile": sys.getprofile(),
        "filters": [str(one) for one in warnings.filters],
        "denormals": (torch.tensor(1e-40) * 1).item() > 0,
        "kernels": {name: torch._C._dispatch_dump(f"aten::{name}") for name in ("dropout", "rms_norm", "batch_norm")},
        "ranks": torch.distributed.is_initialized(),
        "hooks": len(nn.modules.module._global_forward_hooks),
    }


def noisy() -> nn.Module:
    """Draws from every generator while it is built."""
    random.random(), numpy.random.rand()
    return Blocks(dropout=0.1)


class Drawn(Dataset[dict[str, torch.Tensor]]):
    """Augments its samples."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        random.random(), numpy.random.rand()
        return {name: torch.rand(WIDTH) for name in ("x", "y")}


@pytest.mark.parametrize(
    "look",
    [
        lambda job: mw.plan(job, CLUSTER),
        lambda job: mw.plan(job, CLUSTER, strategies=["single,bf16,compile", "tp=2,fsdp"]),
        lambda job: mw.layout(job, "tp=2"),
        lambda job: mw.timeline(job, "pp=2:1f1b", CLUSTER),
    ],
    ids=["plan", "traces", "layout", "timeline"],
)
def test_it_is_as_before(look: Callable[[mw.Job], Any]) -> None:
    job = make_job(model=noisy, data=Drawn(), sample=None)
    before = state()
    look(job)
    assert state() == before
