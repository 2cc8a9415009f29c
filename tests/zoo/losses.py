"""Losses that are no sum over samples, and weights that depend on data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Job
from zoo.jobs import CLASSES, LENGTH, VOCABULARY, WIDTH, Block, Trunk, entry, make_job, token_loss, tokens


def pairs(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, WIDTH), "y": torch.randn(n, WIDTH)}


class Towers(nn.Module):
    """As CLIP: two towers and a learnt temperature without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 8), Block(8), Block(8))
        self.right = nn.Sequential(nn.Linear(WIDTH, 8), Block(8), Block(8))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        left, right = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        return {"left": left, "right": right, "scale": self.scale.exp(), "bias": self.bias}


def clip_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    n = len(batch["y"])
    scores = output["scale"] * output["left"] @ output["right"].t()
    target = torch.arange(n)
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2 * n, n


def siglip_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    n = len(batch["y"])
    scores = output["scale"] * output["left"] @ output["right"].t() + output["bias"]
    return -F.logsigmoid(scores * (2 * torch.eye(n).to(scores) - 1)).sum(), n


@entry()
def contrastive() -> Job:
    """CLIP's loss: every sample against every other."""
    return make_job(Towers, pairs, inputs=lambda batch: (batch["x"], batch["y"]), loss=clip_loss)


@entry()
def sigmoid_pairs() -> Job:
    """SigLIP's loss: a sum over pairs of samples."""
    return make_job(Towers, pairs, inputs=lambda batch: (batch["x"], batch["y"]), loss=siglip_loss)


class ClipInside(Towers):
    """As transformers' CLIP with return_loss: the loss over the batch is computed in the model."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return clip_loss(super().forward(x, y), {"y": y})[0] / len(y)


@entry()
def contrastive_inside() -> Job:
    """CLIP's loss, computed inside the model."""
    return make_job(
        ClipInside,
        pairs,
        inputs=lambda batch: (batch["x"], batch["y"]),
        loss=lambda output, batch: (output * len(batch["y"]), len(batch["y"])),
    )


def barlow_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    n = len(batch["y"])
    centred = output - output.mean(0)
    covariance = centred.t() @ centred / (n - 1)
    return (covariance - torch.eye(CLASSES).to(output)).square().sum() * n, n


@entry()
def batch_statistics() -> Job:
    """A loss over the batch's covariance, as in Barlow Twins and VICReg."""
    return make_job(Trunk, loss=barlow_loss)


CUT = ("ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "hsdp=2x2", "pp=2:1f1b", "ddp=2,pp=2:1f1b")


class ClippedByHook(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.leave.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@entry(refused=dict.fromkeys(CUT, "the gradient of leave.weight depends on which samples"))
def clipped_by_hook() -> Job:
    """A hook that clips a gradient: of a part of the batch it is another one."""
    return make_job(ClippedByHook)


class ByFrequency(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True)
        self.block = Block(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.token(x)))


@entry(refused=dict.fromkeys(CUT, "the gradient of token.weight depends on which samples"))
def gradient_by_frequency() -> Job:
    """Embedding(scale_grad_by_freq=True): gradients are divided by how often the batch has a token."""
    return make_job(ByFrequency, tokens)


def masked_tokens(n: int) -> dict[str, Tensor]:
    return {**tokens(n), "counts": torch.rand(n, LENGTH) < 0.6}


def masked_loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="none")
    return (each * batch["counts"].flatten()).sum(), batch["counts"].sum()


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY))


@entry()
def masked_weight() -> Job:
    """The loss's weight is a number of tokens that depends on the data."""
    return make_job(language_model, masked_tokens, loss=masked_loss, max_norm=0.3)


class Balanced(nn.Module):
    """A router whose auxiliary loss is a product of means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.token(x)
        chances = self.router(y).softmax(-1)
        auxiliary = 3 * (chances.mean((0, 1)) * F.one_hot(chances.argmax(-1), 3).to(y).mean((0, 1))).sum()
        return self.head(y + torch.einsum("bld,ede,ble->bld", y, self.experts[:, :, :3], chances)), auxiliary


def balanced_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    total, weight = token_loss(output[0], batch)
    return total + 0.1 * output[1] * weight, weight


@entry()
def router_balance() -> Job:
    """A router's auxiliary loss: a product of two means over the batch."""
    return make_job(Balanced, tokens, loss=balanced_loss)


@entry()
def weighted_samples() -> Job:
    """Samples with weights of their own, by which the sum is divided."""

    def sample(n: int) -> dict[str, Tensor]:
        return {"x": torch.randn(n, WIDTH), "y": torch.randn(n, CLASSES), "w": torch.rand(n) + 0.1}

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return ((output - batch["y"]).square().sum(1) * batch["w"]).sum(), batch["w"].sum()

    return make_job(Trunk, sample, loss=loss)
