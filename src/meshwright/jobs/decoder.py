"""A plain decoder-only transformer of any shape, for presets and for comparisons with published runs.

    job = decoder_job(Shape(layers=32, width=4096, heads=32, kv_heads=8, feed_forward=14336, vocabulary=128256,
                            length=8192), global_batch=512)

It uses only PyTorch's layers, with separate query, key and value projections, so that every strategy supports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from meshwright.errors import JobError
from meshwright.facts.job import Job, NamedParameters

Norm = Literal["rms", "layer"]
Positions = Literal["rotary", "learned"]
Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], tuple[Tensor, int]]

_SIZES = ("layers", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "length")
GPT: dict[str, Any] = {"gated": False, "norm": "layer", "positions": "learned", "biases": True}
"""How the blocks of GPT-2 and of encoders differ from a Llama's."""
_ROTARY_BASE = 10000.0
_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder. The defaults are a Llama's; GPT-2 has layer norms, learned positions, biases, no gate."""

    layers: int
    width: int
    """Width of the residual stream."""
    heads: int
    kv_heads: int
    """Heads of keys and values; each serves heads / kv_heads query heads."""
    feed_forward: int
    """Inner width of the feed-forward layer."""
    vocabulary: int
    length: int
    """Tokens of a sample, and the number of positions that the model supports."""
    gated: bool = True
    """silu(gate) * up before the last matrix of a block, or gelu(up)."""
    tied: bool = False
    """Whether the head and the embedding share their weight."""
    norm: Norm = "rms"
    positions: Positions = "rotary"
    biases: bool = False
    """On every linear layer but the head, and on layer norms."""
    qkv_biases: bool = False
    """Only on query, key and value, as in Qwen 2."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise JobError(f"Shape({name}=...) must be a whole number of at least 1, but it is {size!r}.")
        for name, words in (("norm", Norm), ("positions", Positions)):
            if getattr(self, name) not in get_args(words):
                raise JobError(f"Shape({name}={getattr(self, name)!r}) is unknown; use {' or '.join(get_args(words))}.")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.width % self.heads:
            raise JobError(f"Shape(width={self.width}, heads={self.heads}): give a number of heads that divides width.")
        if self.heads % self.kv_heads:
            raise JobError(
                f"Shape(heads={self.heads}, kv_heads={self.kv_heads}): give a number of kv_heads that divides heads."
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise JobError(
                f"Shape(width={self.width}, heads={self.heads}): a head is {self.head_width} wide, but rotary "
                "positions need pairs; give an even head width, or positions='learned'."
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class Linear(nn.Linear):
    """nn.Linear with small initial weights. They are drawn once: PyTorch would first draw its own and discard them."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_STD)


class Attention(nn.Module):
    """Self-attention, causal or over all tokens."""

    def __init__(self, shape: Shape, *, causal: bool = True) -> None:
        super().__init__()
        self.head_width, self.grouped, self.causal = shape.head_width, shape.kv_heads != shape.heads, causal
        narrow, bias = shape.kv_heads * shape.head_width, shape.biases or shape.qkv_biases
        self.query = Linear(shape.width, shape.width, bias=bias)
        self.key = Linear(shape.width, narrow, bias=bias)
        self.value = Linear(shape.width, narrow, bias=bias)
        self.out = Linear(shape.width, shape.width, bias=shape.biases)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if cos is not None and sin is not None:
            q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.grouped)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    """The feed-forward layer of a block, gated or plain."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Linear(shape.width, shape.feed_forward, bias=shape.biases) if shape.gated else None
        self.up = Linear(shape.width, shape.feed_forward, bias=shape.biases)
        self.down = Linear(shape.feed_forward, shape.width, bias=shape.biases)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """A pre-norm transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(
        self,
        shape: Shape,
        *,
        causal: bool = True,
        attention: nn.Module | None = None,
        feed_forward: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = norm(shape)
        self.attention = attention or Attention(shape, causal=causal)
        self.feed_forward_norm = norm(shape)
        self.feed_forward = feed_forward or FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder-only transformer from token ids to logits."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, shape: Shape, *, block: Callable[[int], nn.Module] | None = None, rotary_width: int | None = None
    ) -> None:
        """`block` makes the block of a layer, if not all are alike; `rotary_width` is what is rotated of a head."""
        super().__init__()
        self.token = Embedding(shape.vocabulary, shape.width)
        self.position = Embedding(shape.length, shape.width) if shape.positions == "learned" else None
        make = block or (lambda layer: Block(shape))
        self.blocks = nn.ModuleList(make(layer) for layer in range(shape.layers))
        self.norm = norm(shape)
        self.head = Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.token.weight
        cos, sin = rotary_tables(shape, rotary_width) if shape.positions == "rotary" else (None, None)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.token(tokens), tokens.shape[1]
        cos = sin = None
        if self.position is not None:
            x = x + self.position(torch.arange(length, device=tokens.device))
        else:
            cos, sin = self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def norm(shape: Shape) -> nn.Module:
    return nn.RMSNorm(shape.width, eps=1e-5) if shape.norm == "rms" else nn.LayerNorm(shape.width, bias=shape.biases)


def rotary_tables(shape: Shape, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, repeated for both halves of a head, or of a part of this width."""
    width = width or shape.head_width
    speeds = _ROTARY_BASE ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(shape.length), speeds).repeat(1, 2)
    return angles.cos(), angles.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of every head by their angles, in the dtype of `x`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def adamw(parameters: NamedParameters) -> Optimizer:
    """AdamW with the usual settings for decoders."""
    return AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def token_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Cross entropy summed over tokens, and their number."""
    y = batch["y"]
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def adamw_job(model: Callable[[], nn.Module], loss: Loss, sample: Callable[[int], Batch], global_batch: int) -> Job:
    """The job of training a model from a batch's x to its y with AdamW."""
    return Job(
        model=model,
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=adamw,
        max_norm=1.0,
        sample=sample,
        global_batch=global_batch,
    )


def decoder_job(
    shape: Shape, *, global_batch: int, length: int | None = None, build: Callable[[], nn.Module] | None = None
) -> Job:
    """The job of training a decoder on made-up tokens, with `length` tokens per sample (default: all positions).

    `build` makes another model of this shape.
    """
    tokens = shape.length if length is None else length
    if not 1 <= tokens <= shape.length:
        raise JobError(f"length={tokens} was given, but the decoder supports 1 to {shape.length} tokens; use fewer.")

    def sample(n: int) -> Batch:
        text = torch.randint(shape.vocabulary, (n, tokens + 1))
        return {"x": text[:, :-1], "y": text[:, 1:]}

    return adamw_job(build or (lambda: Decoder(shape)), token_loss, sample, global_batch)
