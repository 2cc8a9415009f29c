"""Plain encoders of any shape: BERT over tokens, and ViT and ResNet over images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.jobs import decoder
from meshwright.jobs.decoder import GPT, Batch, Linear, Shape, adamw_job, token_loss

_KINDS_OF_SENTENCE = 2
_SIDE, _CLASSES = 224, 1000
_WIDER = 4
"""The ratio of a bottleneck's output width to its inner width."""
_MASKED = 0.15
"""The share of tokens that are masked."""


class PostNormBlock(nn.Module):
    """A transformer block with the norms after the residual additions, as in the first transformers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = decoder.Attention(shape, causal=False)
        self.attention_norm = nn.LayerNorm(shape.width)
        self.feed_forward = decoder.FeedForward(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.feed_forward_norm(x + self.feed_forward(x))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """An encoder from token ids to logits at every position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = decoder.Embedding(shape.vocabulary, shape.width)
        self.position = decoder.Embedding(shape.length, shape.width)
        self.sentence = decoder.Embedding(_KINDS_OF_SENTENCE, shape.width)
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

    return adamw_job(lambda: Bert(shape), token_loss, sample, global_batch)


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
        sizes: Any = dict(layers=self.layers, width=self.width, heads=self.heads, kv_heads=self.heads)
        length = (self.side // self.patch) ** 2 + 1
        return Shape(**sizes, feed_forward=self.feed_forward, vocabulary=self.classes, length=length, **GPT)


class ViT(nn.Module):
    """An encoder from images to class logits."""

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        inner = shape.sequence
        self.patch = nn.Conv2d(3, shape.width, shape.patch, stride=shape.patch)
        self.gather = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.position = nn.Parameter(torch.empty(1, inner.length, shape.width).normal_(std=0.02))
        self.blocks = nn.ModuleList(decoder.Block(inner, causal=False) for _ in range(shape.layers))
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
    sample = partial(sample_images, side=shape.side, classes=shape.classes)
    return adamw_job(lambda: ViT(shape), class_loss, sample, global_batch)


def class_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """Cross entropy summed over samples, and their number."""
    y = batch["y"]
    return F.cross_entropy(logits, y, reduction="sum"), len(y)


def sample_images(n: int, side: int, classes: int) -> Batch:
    """Random images and classes."""
    return {"x": torch.randn(n, 3, side, side), "y": torch.randint(classes, (n,))}


class Bottleneck(nn.Module):
    """A residual block of convolutions: 1x1 to a smaller width, 3x3, and 1x1 to a larger one."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = _WIDER * width
        self.narrow, self.narrow_norm = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.look = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.look_norm = nn.BatchNorm2d(width)
        self.widen, self.widen_norm = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.narrow_norm(self.narrow(x)))
        y = F.relu(self.look_norm(self.look(y)))
        return F.relu(self.widen_norm(self.widen(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A convolutional network from images to class logits; `depths` are the numbers of blocks at each of four sizes."""

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)
        blocks, before = [], 64
        for size, depth in enumerate(depths):
            for place in range(depth):
                blocks.append(Bottleneck(before, 64 << size, 2 if size and place == 0 else 1))
                before = _WIDER * (64 << size)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(images))), 3, 2, padding=1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def resnet_job(depths: Sequence[int], *, global_batch: int) -> Job:
    return Job(
        model=lambda: ResNet(depths),
        inputs=lambda batch: (batch["x"],),
        loss=class_loss,
        optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4),
        sample=lambda n: sample_images(n, _SIDE, _CLASSES),
        global_batch=global_batch,
    )
