"""A job and the same training written by hand, which checkpoints of other tools are moved between.

It has what gets lost on the way: two parameter groups, a tied and a frozen parameter, a parameter that gets no
gradient, a buffer, and a schedule. Adam's eps is large, so that rounding does not become a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

import tiny_jobs
from meshwright import Job

WORDS, WIDTH, LENGTH, BATCH = 31, 16, 6, 4
BEFORE, AFTER = 3, 10
"""Steps before and after a move."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.unused = nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x) + self.scale * self.frozen(self.token(x))
        for block in self.blocks:
            y = block(y)
        return self.head(y)


def optimizer_of(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    groups: list[list[nn.Parameter]] = [[], []]
    for _, parameter in named:
        groups[parameter.dim() < 2].append(parameter)
    decayed, plain = groups
    return AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=3e-3, eps=1e-4)


def schedule_of(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, rate)


def rate(step: int) -> float:
    return min(1.0, (step + 1) / 5) * 0.97**step


def batch_of(step: int) -> dict[str, Tensor]:
    text = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return {"x": text[:, :-1], "y": text[:, 1:]}


def mean_loss(model: Any, step: int) -> Tensor:
    batch = batch_of(step)
    output = model(batch["x"])
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def job_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def sample(count: int) -> dict[str, Tensor]:
    text = torch.randint(WORDS, (count, LENGTH + 1))
    return {"x": text[:, :-1], "y": text[:, 1:]}


job = Job(
    model=Model,
    inputs=lambda batch: (batch["x"],),
    loss=job_loss,
    optimizer=lambda params: optimizer_of(params.named()),
    schedule=schedule_of,
    sample=sample,
    global_batch=BATCH,
)

# Variants that an import must refuse or tell about.
one_group = replace(job, optimizer=lambda params: AdamW(params, lr=3e-3, eps=1e-4))
without_schedule = replace(job, schedule=None)
stepped = replace(job, schedule=lambda optimizer: StepLR(optimizer, 2))


# Of transformers and peft.


def trainer_optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """The groups that transformers' Trainer makes."""
    pairs = list(named)
    plain = [p for name, p in pairs if "bias" in name or ".ln_" in name]
    decayed = [p for name, p in pairs if not ("bias" in name or ".ln_" in name)]
    return AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=3e-3, eps=1e-4)


def trainer_schedule(optimizer: Optimizer) -> LambdaLR:
    """The Trainer's default: to zero at its last step."""
    return LambdaLR(optimizer, lambda step: max(0.0, (BEFORE + AFTER - step) / (BEFORE + AFTER)))


def simple_optimizer(params: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=3e-3, eps=1e-4, weight_decay=0.1)


def base() -> nn.Module:
    """A small GPT-2, the same whatever the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return without_dropout(tiny_jobs.gpt2())


def adapted() -> nn.Module:
    """With LoRA."""
    import peft

    options = peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True)
    return peft.get_peft_model(base(), options)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


hf = replace(
    job,
    model=lambda: without_dropout(tiny_jobs.gpt2()),
    optimizer=lambda params: trainer_optimizer(params.named()),
    schedule=trainer_schedule,
)
lora = replace(job, model=adapted, optimizer=simple_optimizer)


@dataclass
class Training:
    """The same training by hand, in plain PyTorch."""

    model: Any
    optimizer: Any
    schedule: Any
    step: int = 0

    def go_on(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = mean_loss(self.model, self.step)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item())
        return losses


def by_hand(chosen: Job = job, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = chosen.model()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = optimizer_of(trained) if chosen is not lora else simple_optimizer([p for _, p in trained])
    return Training(model, optimizer, schedule_of(optimizer))
