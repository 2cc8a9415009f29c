"""Mixtures of experts as tiny jobs: four of Hugging Face transformers, and two as one writes them by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import architecture_jobs
from architecture_jobs import DEEPSEEK_SIZES, FEW_EXPERTS, GROUPED, VOCABULARY, WIDTH, language, sample_text
from meshwright import Job
from zoo.judge import without_dropout

LAYERS, EXPERTS, CHOSEN, HEADS = 2, 4, 2, 4
FEW_LAYERS = {"num_hidden_layers": LAYERS}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Stacked(nn.Module):
    """All experts as one pair of weights, computed one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(0.1 * torch.randn(EXPERTS, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = torch.where(index == number)
            result = result.index_add(0, token, F.silu(x[token] @ up) @ down * weights[token, place, None])
        return result


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), experts

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.router(x).softmax(-1).topk(CHOSEN)
        return weights / weights.sum(-1, keepdim=True), index

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, index = self.route(tokens)
        return self.experts(tokens, index, weights).view_as(x)


class ListedMixture(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, index = self.route(tokens)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):  # type: ignore[arg-type]
            token, place = torch.where(index == number)
            if len(token):
                result.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return result.view_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.mixture = nn.LayerNorm(WIDTH), Attention(), mixture

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mixture(self.norm(x))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(_mixture(kind)) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


def _mixture(kind: str) -> nn.Module:
    if kind == "stacked":
        return Mixture(Stacked())
    return ListedMixture(nn.ModuleList(Expert() for _ in range(EXPERTS)))


def token_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    y = batch["y"]
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def by_hand(kind: str) -> Job:
    return Job(
        model=lambda: Model(kind),
        inputs=lambda batch: (batch["x"],),
        loss=token_loss,
        optimizer=lambda params: SGD(params, lr=0.02, momentum=0.9),
        max_norm=1.0,
        sample=sample_text,
        global_batch=architecture_jobs.BATCH,
    )


def with_router_loss(job: Job) -> Job:
    """The auxiliary loss of the routers is part of the output; it is a mean over all tokens of a batch."""

    def loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        total, weight = architecture_jobs.token_loss(output, batch)
        return total + 0.01 * weight * output.aux_loss, weight

    inputs = job.inputs
    return replace(job, inputs=lambda batch: {**inputs(batch), "output_router_logits": True}, loss=loss)


def _plain(job: Job) -> Job:
    """Without dropout, and with SGD: Adam makes a whole step of a rounding error."""
    return without_dropout(replace(job, optimizer=lambda params: SGD(params, lr=0.02, momentum=0.9)))


MIXTRAL = _plain(language("Mixtral", {**GROUPED, **FEW_LAYERS, "num_local_experts": EXPERTS}))
MIXTURES: dict[str, Job] = {
    "Mixtral": MIXTRAL,
    "Qwen3-MoE": _plain(
        language("Qwen3Moe", {**GROUPED, **FEW_EXPERTS, **FEW_LAYERS, "head_dim": 8, "num_experts": EXPERTS})
    ),
    "OLMoE": _plain(language("Olmoe", {**GROUPED, **FEW_EXPERTS, **FEW_LAYERS, "num_experts": EXPERTS})),
    "DeepSeek-V3": _plain(language("DeepseekV3", {**DEEPSEEK_SIZES, **FEW_LAYERS, "first_k_dense_replace": 1})),
    "Mixtral, router loss": with_router_loss(MIXTRAL),
    "stacked by hand": by_hand("stacked"),
    "list by hand": by_hand("listed"),
}


def find_job(name: str) -> Job:
    return MIXTURES[name]
