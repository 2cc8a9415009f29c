"""A decoder whose feed-forward layers are mixtures of experts, as in Mixtral and DeepSeek-V3, for presets.

Experts are stacked weights in a module that gets tokens, indices and weights, so that `ep` can divide them. Nothing is
dropped. On tensors without values routing is balanced: each expert gets as many tokens as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.facts.job import Job
from meshwright.jobs.decoder import Block, Decoder, FeedForward, Linear, Shape, decoder_job, norm, turn
from meshwright.recording.report_as_cpu import is_meta
from meshwright.torch_private.fake_tensors import FakeTensor

_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The sizes of a mixture."""

    count: int
    chosen: int
    """Experts that a token uses."""
    width: int
    """Inner width of an expert."""
    shared: int = 0
    """Inner width of a feed-forward layer beside the experts that every token uses; 0 if there is none."""
    dense_layers: int = 0
    """Layers at the beginning without experts."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Widths of attention whose queries, keys and values go through narrow layers (multi-head latent attention)."""

    query: int
    key_value: int
    plain: int
    """Of a head's query and key, without positions."""
    rotary: int
    """Of a head's query and key, with positions; the key's is the same for all heads."""
    value: int


class StackedExperts(nn.Module):
    """Gated feed-forward layers, one per expert, as stacked weights."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts.count, width, experts.width).normal_(std=_STD))
        self.up = nn.Parameter(torch.empty(experts.count, width, experts.width).normal_(std=_STD))
        self.down = nn.Parameter(torch.empty(experts.count, experts.width, width).normal_(std=_STD))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen, flat = index.shape[1], index.reshape(-1)
        order = flat.argsort(stable=True)
        rows = x.index_select(0, order // chosen)
        product = _products(flat, len(self.up), rows)
        y = product(F.silu(product(rows, self.gate)) * product(rows, self.up), self.down)
        y = y * weights.reshape(-1, 1).index_select(0, order).to(y.dtype)
        return torch.zeros_like(x).index_add(0, order // chosen, y)


def _products(index: Tensor, experts: int, rows: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that multiplies rows, sorted by expert, with the matrix of each one's expert."""
    if isinstance(rows, FakeTensor) or is_meta(rows):
        return _balanced
    counts = torch.bincount(index, minlength=experts)
    if rows.is_cuda and rows.dtype == torch.bfloat16:  # the kernel knows no other dtype
        ends = counts.cumsum(0, dtype=torch.int32)
        return lambda x, weight: F.grouped_mm(x, weight, offs=ends)
    sizes = counts.tolist()
    return lambda x, weight: torch.cat([own @ matrix for own, matrix in zip(x.split(sizes), weight, strict=True)])


def _balanced(x: Tensor, weight: Tensor) -> Tensor:
    rows, experts = len(x), len(weight)
    padded = F.pad(x, (0, 0, 0, -rows % experts)) if rows % experts else x
    return torch.bmm(padded.view(experts, -1, x.shape[1]), weight).flatten(0, 1)[:rows]


class Mixture(nn.Module):
    """A router, its experts, and perhaps a layer that every token uses."""

    def __init__(self, shape: Shape, experts: Experts) -> None:
        super().__init__()
        self.chosen = experts.chosen
        self.router = Linear(shape.width, experts.count, bias=False)
        self.experts = StackedExperts(shape.width, experts)
        self.shared = FeedForward(replace(shape, feed_forward=experts.shared)) if experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).float().softmax(-1).topk(self.chosen)
        y: Tensor = self.experts(tokens, index, weights / weights.sum(-1, keepdim=True)).view_as(x)
        return y if self.shared is None else y + self.shared(x)


class LatentAttention(nn.Module):
    """Causal attention whose queries, keys and values are expanded from narrow ones."""

    def __init__(self, shape: Shape, latent: Latent) -> None:
        super().__init__()
        self.latent, self.heads = latent, shape.heads
        both = latent.plain + latent.rotary
        self.query_down = Linear(shape.width, latent.query, bias=False)
        self.query_norm = norm(replace(shape, width=latent.query, heads=1, kv_heads=1))
        self.query_up = Linear(latent.query, shape.heads * both, bias=False)
        self.key_down = Linear(shape.width, latent.key_value + latent.rotary, bias=False)
        self.key_norm = norm(replace(shape, width=latent.key_value, heads=1, kv_heads=1))
        self.key_up = Linear(latent.key_value, shape.heads * (latent.plain + latent.value), bias=False)
        self.out = Linear(shape.heads * latent.value, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        own, heads = self.latent, self.heads
        q = self.query_up(self.query_norm(self.query_down(x))).unflatten(-1, (heads, -1)).transpose(1, 2)
        narrow, rotary = self.key_down(x).split([own.key_value, own.rotary], dim=-1)
        k, v = (
            self.key_up(self.key_norm(narrow))
            .unflatten(-1, (heads, -1))
            .transpose(1, 2)
            .split([own.plain, own.value], dim=-1)
        )
        plain, turned = q.split([own.plain, own.rotary], dim=-1)
        shared = turn(rotary.unsqueeze(1), cos, sin).expand(-1, heads, -1, -1)
        q, k = torch.cat((plain, turn(turned, cos, sin)), -1), torch.cat((k, shared), -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


def mixture_job(
    shape: Shape, *, experts: Experts, latent: Latent | None = None, global_batch: int, length: int | None = None
) -> Job:
    """The job of training such a decoder on made-up tokens."""

    def block(layer: int) -> nn.Module:
        return Block(
            shape,
            attention=LatentAttention(shape, latent) if latent else None,
            feed_forward=Mixture(shape, experts) if layer >= experts.dense_layers else None,
        )

    def build() -> nn.Module:
        return Decoder(shape, block=block, rotary_width=latent.rotary if latent else None)

    return decoder_job(shape, global_batch=global_batch, length=length, build=build)
