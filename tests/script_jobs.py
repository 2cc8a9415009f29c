"""A job that has what scripts have, and the same training in plain PyTorch, with nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

import contrastive_jobs
import pieced_jobs
from meshwright import EarlyStop, Evaluation, Job, Metric
from tiny_jobs import LENGTH, VOCABULARY, Transformer

SAMPLES, BATCH, HELD_OUT = 26, 8, 11  # the last batch of an epoch has two samples, the last of an evaluation three
EVERY, DECAY, MAX_NORM, LIMIT = 3, 0.9, 0.05, 0.02
UNDECAYED = ("*.bias", "*norm*")


class Text:
    """Made-up token sequences, of which some tokens count."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._text = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
        self._counts = torch.rand(samples, LENGTH, generator=generator) < 0.7

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = self._text[index]
        return {"x": text[:-1], "y": text[1:], "counts": self._counts[index]}


def build() -> nn.Module:
    model = Transformer()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def masked_loss(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The weight depends on the data, so it is known only at run time."""
    each = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    counts = batch["counts"].flatten()
    return (each * counts).sum(), counts.sum()


def accuracy(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (logits.argmax(-1) == batch["y"]).sum(), batch["y"].numel()


def confusion(logits: Tensor, batch: Any) -> Tensor:
    """Hits, misses and false alarms for the lower half of the vocabulary."""
    told, true = logits.argmax(-1) < VOCABULARY // 2, batch["y"] < VOCABULARY // 2
    return torch.stack([(told & true).sum(), (~told & true).sum(), (told & ~true).sum()])


def f1(totals: list[float]) -> float:
    hits, misses, alarms = totals
    return 2 * hits / (2 * hits + misses + alarms)


def limit_gradient(name: str, gradient: Tensor) -> Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def optimizer(params: Any) -> AdamW:
    return AdamW(params.groups({UNDECAYED: {"weight_decay": 0.0}}), lr=1e-2, weight_decay=0.1, eps=1e-4)


def script_job(**changes: Any) -> Job:
    evaluation = Evaluation(
        data=Text(HELD_OUT, seed=1),
        metrics={"accuracy": accuracy, "f1": Metric(sums=confusion, result=f1)},
        every=EVERY,
        weights=changes.pop("weights", "trained"),
    )
    parts: dict[str, Any] = {
        "model": build,
        "inputs": lambda batch: (batch["x"],),
        "loss": masked_loss,
        "optimizer": optimizer,
        "schedule": lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
        "schedule_by": "epoch",
        "max_norm": MAX_NORM,
        "data": Text(SAMPLES, seed=0),
        "global_batch": BATCH,
        "evaluation": evaluation,
        "ema": DECAY,
        "early_stop": EarlyStop(metric="accuracy", better="higher", patience=100),
        "on_gradient": limit_gradient,
    }
    return Job(**parts | changes)


@dataclass
class PlainRun:
    """What a plain loop found."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)


def train_plainly(epochs: int, *, seed: int = 0, averaged: bool = False, hook: bool = True) -> PlainRun:
    """The job above as a script; evaluations use the average if `averaged`."""
    torch.manual_seed(seed)
    model = build().train()
    without = [p for n, p in model.named_parameters() if n.endswith(".bias") or "norm" in n]
    rest = [p for p in model.parameters() if not any(p is other for other in without)]
    made = AdamW([{"params": without, "weight_decay": 0.0}, {"params": rest}], lr=1e-2, weight_decay=0.1, eps=1e-4)
    schedule, average = StepLR(made, 1, gamma=0.5), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    data, found, step = Text(SAMPLES, seed=0), PlainRun(), 0
    for epoch in range(epochs):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        for first in range(0, SAMPLES, BATCH):
            batch = default_collate([data[index] for index in order[first : first + BATCH]])
            total, weight = masked_loss(model(batch["x"]), batch)
            made.zero_grad()
            (total / weight).backward()
            if hook:
                torch.nn.utils.clip_grad_value_(model.parameters(), LIMIT)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            made.step()
            average.update_parameters(model)
            found.losses.append((total / weight).item())
            step += 1
            if step % EVERY == 0 or first + BATCH >= SAMPLES:
                found.evaluations.append({"step": step, **evaluate_plainly(average.module if averaged else model)})
        schedule.step()
    found.weights = {n: t.clone() for n, t in model.state_dict().items()}
    found.averages = {n: t.clone() for n, t in average.module.state_dict().items()}
    return found


@torch.no_grad()
def evaluate_plainly(model: nn.Module) -> dict[str, float]:
    model.eval()
    batch = default_collate([Text(HELD_OUT, seed=1)[index] for index in range(HELD_OUT)])
    logits = model(batch["x"])
    (total, weight), (hits, count) = masked_loss(logits, batch), accuracy(logits, batch)
    model.train()
    parts = [float(value) for value in confusion(logits, batch)]
    return {"loss": float(total / weight), "accuracy": float(hits / count), "f1": f1(parts)}


JOBS = {
    "trained": partial(script_job),
    "averaged": partial(script_job, weights="ema"),
    "no hook": partial(script_job, weights="ema", on_gradient=None),
}


def divided_head() -> Job:
    """Classes that two ranks can divide, so that outputs are divided as well."""
    return replace(script_job(on_gradient=None), model=pieced_jobs.Tied)


def pairs_that_match(output: Any, batch: Any) -> tuple[Tensor, int]:
    return (output["image"] * output["text"]).sum(-1).sigmoid().sum(), len(batch["kind"])


def contrastive() -> Job:
    """A loss that compares samples with each other; its last batch leaves a rank without samples."""
    data = [contrastive_jobs.item(index) for index in range(9)]
    evaluation = Evaluation(data=data, metrics={"match": pairs_that_match}, batch=4)
    return replace(contrastive_jobs.clip, data=data, evaluation=evaluation)


MEASURED = {"divided head": divided_head, "contrastive": contrastive}
