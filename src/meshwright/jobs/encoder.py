"""Plain encoders of any shape: BERT over tokens, and ViT over image patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.jobs.decoder import Attention, Batch, Block, Embedding, FeedForward, Linear, Shape, adamw, token_loss

_KINDS_OF_SENTENCE = 2
_MASKED = 0.15
"""The share of tokens that are masked."""


class PostNormBlock(nn.Module):
    """A transformer block with the norms after the residual additions, as in the first transformers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape, causal=False)
        self.attention_norm = nn.LayerNorm(shape.width)
        self.feed_forward = FeedForward(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.feed_forward_norm(x + self.feed_forward(x))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """An encoder from token ids to logits at every position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = Embedding(shape.vocabulary, shape.width)
        self.position = Embedding(shape.length, shape.width)
        self.sentence = Embedding(_KINDS_OF_SENTENCE, shape.width)
        self.norm = nn.LayerNorm(shape.width)
        self.blocks = nn.ModuleList(PostNormBlock(shape) for _ in range(shape.layers))
        self.transform = Linear(shape.width, shape.width)
        self.transform_norm = nn.LayerNorm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.token(tokens) + self.position(places) + self.sentence(torch.zeros_like(tokens)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.transform_norm(F.gelu(self.transform(x))))
        return logits


def bert_job(shape: Shape, *, global_batch: int, length: int | None = None) -> Job:
    """Masked language modelling. Every position counts in the loss, so that its weight depends only on the shape."""
    tokens = shape.length if length is None else length
    if not 1 <= tokens <= shape.length:
        raise JobError(f"length={tokens} was given, but the encoder supports 1 to {shape.length} tokens; use fewer.")

    def sample(n: int) -> Batch:
        y = torch.randint(1, shape.vocabulary, (n, tokens))
        return {"x": y.masked_fill(torch.rand(n, tokens) < _MASKED, 0), "y": y}

    return Job(
        model=lambda: Bert(shape),
        inputs=lambda batch: (batch["x"],),
        loss=token_loss,
        optimizer=adamw,
        max_norm=1.0,
        sample=sample,
        global_batch=global_batch,
    )


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """The sizes of a ViT."""

    layers: int
    width: int
    heads: int
    feed_forward: int
    patch: int
    """The side length of a patch."""
    side: int = 224
    classes: int = 1000

    @property
    def sequence(self) -> Shape:
        """The shape of the encoder, which runs over the patches and one class token."""
        return Shape(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads,
            feed_forward=self.feed_forward,
            vocabulary=self.classes,
            length=(self.side // self.patch) ** 2 + 1,
            gated=False,
            norm="layer",
            positions="learned",
            biases=True,
        )


class ViT(nn.Module):
    """An encoder from images to class logits."""

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        inner = shape.sequence
        self.patch = nn.Conv2d(3, shape.width, shape.patch, stride=shape.patch)
        self.gather = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.position = nn.Parameter(torch.empty(1, inner.length, shape.width).normal_(std=0.02))
        self.blocks = nn.ModuleList(Block(inner, causal=False) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = Linear(shape.width, shape.classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.gather.expand(len(patches), -1, -1), patches), dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


def vit_job(shape: ImageShape, *, global_batch: int) -> Job:
    return Job(
        model=lambda: ViT(shape),
        inputs=lambda batch: (batch["x"],),
        loss=class_loss,
        optimizer=adamw,
        max_norm=1.0,
        sample=lambda n: sample_images(n, shape.side, shape.classes),
        global_batch=global_batch,
    )


def class_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Cross entropy summed over samples, and their number."""
    y = batch["y"]
    return F.cross_entropy(logits, y, reduction="sum"), len(y)


def sample_images(n: int, side: int, classes: int, channels: int = 3) -> Batch:
    """Random images and classes."""
    return {"x": torch.randn(n, channels, side, side), "y": torch.randint(classes, (n,))}
