"""Jobs that between them have everything that cutting a model into stages can get wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from awkward_pipeline_models import (
    Averaging,
    AveragingBlocks,
    ByValue,
    ChangingBatch,
    ChangingFirst,
    ChangingGlue,
    ChangingPast,
    Collecting,
    Doubling,
    Fickle,
    Handing,
    Listening,
    ReadingChanged,
    Routing,
    Selecting,
    Sharing,
)
from meshwright import Job
from pipeline_models import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Biased,
    Frozen,
    FrozenFoot,
    Glued,
    Repeating,
    Skipping,
    Tables,
    Tied,
    Translating,
    Trunk,
    bare_batch_norms,
    batch_norms,
    group_norms,
)


def token_batch(n: int) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (n, LENGTH + 1))
    return {"x": text[:, :-1], "y": text[:, 1:], "counts": torch.rand(n, LENGTH) < 0.6}


def vector_batch(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, LENGTH, WIDTH), "y": torch.randint(VOCABULARY, (n, LENGTH))}


def image_batch(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 2, 6, 6), "y": torch.randint(6, (n,))}


def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output["logits"] if isinstance(output, dict) else output
    return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def masked_loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Counts some tokens only, so its weight depends on the data."""
    each = F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="none")
    counts = batch["counts"].flatten()
    return (each * counts).sum(), counts.sum()


def adam(params: Any) -> AdamW:
    """In groups by name."""
    decayed = [p for name, p in params.named() if not name.endswith("bias")]
    rest = [p for name, p in params.named() if name.endswith("bias")]
    return AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1)


tied = Job(
    model=Tied,
    inputs=lambda batch: {"tokens": batch["x"]},
    loss=loss,
    optimizer=adam,
    schedule=lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    max_norm=0.5,
    sample=token_batch,
    global_batch=8,
)
masked = replace(tied, loss=masked_loss, max_norm=None)
frozen = replace(tied, model=Frozen)
uneven = replace(tied, global_batch=7)
glued = replace(tied, model=Glued)
biased = replace(tied, model=Biased, inputs=lambda batch: (batch["x"],))
translating = replace(tied, model=Translating, inputs=lambda batch: {"source": batch["x"], "target": batch["y"]})
trunk = replace(tied, model=Trunk, inputs=lambda batch: (batch["x"],), sample=vector_batch)
tables = replace(trunk, model=Tables)
skipping = replace(trunk, model=Skipping)
repeating = replace(trunk, model=Repeating)
frozen_foot = replace(trunk, model=FrozenFoot, optimizer=lambda params: AdamW(params, lr=1e-2))
listening = replace(trunk, model=Listening)
sharing = replace(trunk, model=Sharing)
collecting = replace(trunk, model=Collecting)
handing = replace(trunk, model=Handing)
routing = replace(trunk, model=Routing)
doubling = replace(trunk, model=Doubling)
fickle = replace(trunk, model=Fickle, global_batch=32)
changing_glue = replace(trunk, model=ChangingGlue)
changing_first = replace(trunk, model=ChangingFirst)
reading_changed = replace(trunk, model=ReadingChanged)
changing_past = replace(trunk, model=ChangingPast)
changing_batch = replace(trunk, model=ChangingBatch)
by_value = replace(trunk, model=ByValue)
selecting = replace(trunk, model=Selecting)
averaging = replace(trunk, model=Averaging)
averaging_blocks = replace(trunk, model=AveragingBlocks)
convolutions = replace(trunk, model=group_norms, sample=image_batch)
with_batch_norms = replace(trunk, model=batch_norms, sample=image_batch)
with_bare_batch_norms = replace(trunk, model=bare_batch_norms, sample=image_batch)
odd_batch_norms = replace(with_batch_norms, global_batch=7)
