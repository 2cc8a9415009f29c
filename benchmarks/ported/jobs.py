"""The public scripts as jobs: their own models, with the optimizers and schedules that they make.

Batches are those that the original saw, as `run_script.py` noted them. A GAN has two models and is no job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import meshwright as mw

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Ported:
    """A job, and what it needs besides: the seed of the script, and its backward passes in a step."""

    parts: Mapping[str, Any]
    seed: int
    passes: int = 1

    def job(self, first: Batch) -> mw.Job:
        samples = len(next(iter(first.values())))

        def sample(number: int) -> Batch:
            return {name: value[torch.arange(number) % samples] for name, value in first.items()}

        return mw.Job(**self.parts, sample=sample, global_batch=samples)


def positional(batch: Batch) -> tuple[torch.Tensor, ...]:
    return tuple(value for name, value in sorted(batch.items()) if name.isdigit())


def named(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "target"}


def of_target(output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch["target"], reduction="sum"), len(batch["target"])


def of_next_token(output: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits.flatten(0, 1), batch["1"].flatten(), reduction="sum"), batch["1"].numel()


def of_labels(output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
    labels = batch["labels"].flatten()
    logits = output.logits.reshape(len(labels), -1)
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()


def by_dims(params: Any) -> AdamW:
    """Decay for matrices alone."""
    groups = [[p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]]
    settings = ({"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True))
    return AdamW([one for one in settings if one["params"]], lr=0.01, betas=(0.9, 0.95))


def cosine(warmup: Callable[[int], float], first: int, last: int, least: float) -> Callable[[Any], LambdaLR]:
    """Warm up, then a cosine down to the share `least` of the rate."""

    def share(step: int) -> float:
        if step < first:
            return warmup(step)
        done = (step - first) / (last - first)
        return least if step > last else least + 0.5 * (1 + math.cos(math.pi * done)) * (1 - least)

    return lambda optimizer: LambdaLR(optimizer, share)


def linear(warmup: int) -> Callable[[Any], Any]:
    from transformers import get_linear_schedule_with_warmup

    return lambda optimizer: get_linear_schedule_with_warmup(optimizer, warmup, 4)


def nanogpt() -> Ported:
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 48}
    return Ported(
        parts={"model": lambda: GPT(GPTConfig(**sizes, bias=False, dropout=0.0)), "inputs": positional,
               "loss": of_next_token, "optimizer": by_dims, "max_norm": 1.0,
               "schedule": cosine(lambda step: (step + 1) / 3, 2, 6, 6e-5 / 0.01)},
        seed=1337, passes=2,
    )  # fmt: skip


def llama2c() -> Ported:
    from model import ModelArgs, Transformer

    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "multiple_of": 8, "max_seq_len": 16}
    return Ported(
        parts={"model": lambda: Transformer(ModelArgs(**sizes, vocab_size=48)), "inputs": positional,
               "loss": of_next_token, "optimizer": by_dims, "max_norm": 1.0,
               "schedule": cosine(lambda step: step / 2, 2, 3, 0.0)},
        seed=1337, passes=2,
    )  # fmt: skip


def imagenet() -> Ported:
    from torchvision.models import resnet18  # type: ignore[import-not-found]

    def sgd(params: Any) -> SGD:
        return SGD(params, 0.02, momentum=0.9, weight_decay=1e-4)

    return Ported(parts={"model": resnet18, "inputs": positional, "loss": of_target, "optimizer": sgd}, seed=1)


def torchrun() -> Ported:
    parts = {"model": lambda: nn.Linear(20, 1), "inputs": positional, "loss": of_target}
    return Ported(parts=parts | {"optimizer": lambda params: SGD(params, lr=1e-3)}, seed=0)


def t5() -> Ported:
    from tiny_transformers import t5  # type: ignore[import-not-found]

    parts = {"model": t5, "inputs": named, "loss": of_labels, "optimizer": lambda params: AdamW(params, lr=0.002)}
    return Ported(parts=parts, seed=0)


def nlp() -> Ported:
    from tiny_transformers import bert

    parts = {"model": bert, "inputs": named, "loss": of_labels, "schedule": linear(1)}
    return Ported(parts=parts | {"optimizer": lambda params: AdamW(params, lr=1e-2)}, seed=0)


def cv() -> Ported:
    from torchvision.models import ResNet

    def build() -> nn.Module:
        model = ResNet(2).requires_grad_(False)
        model.fc.requires_grad_(True)
        return model  # type: ignore[no-any-return]

    def one_cycle(optimizer: Any) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=3e-2, epochs=1, steps_per_epoch=4)

    parts = {"model": build, "inputs": positional, "loss": of_target, "schedule": one_cycle}
    return Ported(parts=parts | {"optimizer": lambda params: Adam(params, lr=3e-2 / 25)}, seed=0)


def peft() -> Ported:
    from peft import LoraConfig, TaskType, get_peft_model  # type: ignore[import-not-found]
    from tiny_transformers import t5

    def build() -> nn.Module:
        config = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.0)
        return get_peft_model(t5(), config)  # type: ignore[no-any-return]

    parts = {"model": build, "inputs": named, "loss": of_labels, "schedule": linear(0)}
    return Ported(parts=parts | {"optimizer": lambda params: AdamW(params, lr=0.1)}, seed=0)


JOBS: dict[str, Callable[[], Ported]] = {
    "nanoGPT": nanogpt,
    "ImageNet": imagenet,
    "torchrun tutorial": torchrun,
    "FSDP T5": t5,
    "Accelerate NLP": nlp,
    "Accelerate CV": cv,
    "PEFT LoRA": peft,
    "llama2.c (stream)": llama2c,
}
