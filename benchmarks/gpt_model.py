"""The model that all benchmarks train: a plain GPT of any shape, on made-up text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large the model is."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Linear layers keep PyTorch's initial weights; the embedding is also the output layer, so it must start small."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.token.weight
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction=reduction)


def make_up_batch(shape: Shape, samples: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Text in which low tokens are common, as in real text: the loss falls as soon as a model learns that."""
    drawn = torch.rand(samples, shape.length + 1, generator=generator)
    text = (drawn**4 * shape.vocabulary).long()
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}
