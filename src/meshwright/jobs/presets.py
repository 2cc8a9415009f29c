"""Well-known models by name, to plan with: `preset:llama3-8b`, `preset:llama3-8b:seq=4096,batch=512`.

Shapes are the published ones. The code is our own, and there are no weights and no data. A sample is as long as in the
model's training. The global batch is the last one that its authors used, or a usual one if they did not publish it
(marked so in the table).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshwright.errors import JobError
from meshwright.facts.grammar import nearest
from meshwright.facts.job import Job
from meshwright.jobs.decoder import GPT, Shape, decoder_job
from meshwright.jobs.encoder import ImageShape, bert_job, resnet_job, vit_job
from meshwright.jobs.mixture import Experts, Latent, mixture_job
from meshwright.jobs.options import Options, split_options


@dataclass(frozen=True, kw_only=True)
class Text:
    """A model over tokens."""

    shape: Shape
    batch: int
    job: Callable[..., Job] = decoder_job

    def make(self, name: str, options: Options) -> Job:
        shape, length = self.shape, options.seq or self.shape.length
        if shape.positions == "rotary":
            shape = replace(shape, length=length)  # rotary positions are unlimited and have no weights
        elif length > shape.length:
            raise JobError(f"preset:{name} has {shape.length} positions, but seq={length} was given; use fewer.")
        return self.job(shape, global_batch=options.batch or self.batch, length=length)


@dataclass(frozen=True, kw_only=True)
class Images:
    """A model over images."""

    batch: int
    job: Callable[..., Job]

    def make(self, name: str, options: Options) -> Job:
        if options.seq is not None:
            raise JobError(f"preset:{name} takes images, which have no seq={options.seq}; leave it out.")
        return self.job(global_batch=options.batch or self.batch)


_LLAMA = Shape(layers=32, width=4096, heads=32, kv_heads=32, feed_forward=11008, vocabulary=32000, length=4096)
"""Llama 2 7B; the others differ from it in a few sizes."""


def _llama(layers: int, width: int, heads: int, kv_heads: int, feed_forward: int, **others: Any) -> Shape:
    sizes: Any = dict(layers=layers, width=width, heads=heads, kv_heads=kv_heads, feed_forward=feed_forward)
    return replace(_LLAMA, **sizes, **others)


def _gpt(layers: int, width: int, heads: int, length: int = 1024, vocabulary: int = 50257) -> Shape:
    sizes: Any = dict(layers=layers, width=width, heads=heads, kv_heads=heads, feed_forward=4 * width, length=length)
    return Shape(**sizes, vocabulary=vocabulary, tied=True, **GPT)


_LLAMA3: dict[str, Any] = {"vocabulary": 128256, "length": 8192}
_QWEN: dict[str, Any] = {"vocabulary": 152064, "length": 4096, "qkv_biases": True}
_SMALL_QWEN: dict[str, Any] = {**_QWEN, "vocabulary": 151936, "tied": True}

PRESETS: dict[str, Text | Images] = {
    # Llama 3: batches of 4M to 16M tokens, the largest for 405B; those of 3.2 are not published.
    "llama3.2-1b": Text(shape=_llama(16, 2048, 32, 8, 8192, **_LLAMA3, tied=True), batch=512),
    "llama3.2-3b": Text(shape=_llama(28, 3072, 24, 8, 8192, **_LLAMA3, tied=True), batch=512),
    "llama3-8b": Text(shape=_llama(32, 4096, 32, 8, 14336, **_LLAMA3), batch=512),
    "llama3-70b": Text(shape=_llama(80, 8192, 64, 8, 28672, **_LLAMA3), batch=512),
    "llama3-405b": Text(shape=_llama(126, 16384, 128, 8, 53248, **_LLAMA3), batch=2048),
    # Llama 2: 4M tokens.
    "llama2-7b": Text(shape=_llama(32, 4096, 32, 32, 11008), batch=1024),
    "llama2-13b": Text(shape=_llama(40, 5120, 40, 40, 13824), batch=1024),
    "llama2-70b": Text(shape=_llama(80, 8192, 64, 8, 28672), batch=1024),
    # TinyLlama: 2M tokens, 2,048 per sample. The others are not published; 4M tokens are usual.
    "tinyllama-1.1b": Text(shape=_llama(22, 2048, 32, 4, 5632, length=2048), batch=1024),
    "mistral-7b": Text(shape=_llama(32, 4096, 32, 8, 14336, length=8192), batch=512),
    "mistral-large-123b": Text(shape=_llama(88, 12288, 96, 8, 28672, vocabulary=32768, length=8192), batch=512),
    "yi-34b": Text(shape=_llama(60, 7168, 56, 8, 20480, vocabulary=64000), batch=1024),
    "qwen2.5-0.5b": Text(shape=_llama(24, 896, 14, 2, 4864, **_SMALL_QWEN), batch=1024),
    "qwen2.5-1.5b": Text(shape=_llama(28, 1536, 12, 2, 8960, **_SMALL_QWEN), batch=1024),
    "qwen2.5-7b": Text(shape=_llama(28, 3584, 28, 4, 18944, **_QWEN), batch=1024),
    "qwen2.5-14b": Text(shape=_llama(48, 5120, 40, 8, 13824, **_QWEN), batch=1024),
    "qwen2.5-32b": Text(shape=_llama(64, 5120, 40, 8, 27648, **_QWEN), batch=1024),
    "qwen2.5-72b": Text(shape=_llama(80, 8192, 64, 8, 29568, **_QWEN), batch=1024),
    # Mixtral 8x22B (its release of April 2024): 141B parameters, 39B of them active; its batch is not published.
    "mixtral-8x22b": Text(
        shape=_llama(56, 6144, 48, 8, 16384, vocabulary=32768, length=8192),
        batch=512,
        job=partial(mixture_job, experts=Experts(count=8, chosen=2, width=16384)),
    ),
    # DeepSeek-V3 (arXiv:2412.19437, sections 4.2 and 4.3): 671B parameters, 37B active, up to 15,360 samples of 4,096
    # tokens; without the module that predicts a second token, and with a router that has no groups.
    "deepseek-v3": Text(
        shape=_llama(61, 7168, 128, 128, 18432, vocabulary=129280, length=4096),
        batch=15360,
        job=partial(
            mixture_job,
            experts=Experts(count=256, chosen=8, width=2048, shared=2048, dense_layers=3),
            latent=Latent(query=1536, key_value=512, plain=128, rotary=64, value=128),
        ),
    ),
    # GPT-2: 512 samples of 1,024 tokens. GPT-3: 3.2M tokens.
    "gpt2": Text(shape=_gpt(12, 768, 12), batch=512),
    "gpt2-medium": Text(shape=_gpt(24, 1024, 16), batch=512),
    "gpt2-large": Text(shape=_gpt(36, 1280, 20), batch=512),
    "gpt2-xl": Text(shape=_gpt(48, 1600, 25), batch=512),
    "gpt3-175b": Text(shape=_gpt(96, 12288, 96, 2048), batch=1536),
    # BERT, ViT and ResNet as in their papers.
    "bert-base": Text(shape=_gpt(12, 768, 12, 512, vocabulary=30522), batch=256, job=bert_job),
    "bert-large": Text(shape=_gpt(24, 1024, 16, 512, vocabulary=30522), batch=256, job=bert_job),
    "vit-base": Images(
        batch=4096, job=partial(vit_job, ImageShape(layers=12, width=768, heads=12, feed_forward=3072, patch=16))
    ),
    "vit-large": Images(
        batch=4096, job=partial(vit_job, ImageShape(layers=24, width=1024, heads=16, feed_forward=4096, patch=16))
    ),
    "vit-huge": Images(
        batch=4096, job=partial(vit_job, ImageShape(layers=32, width=1280, heads=16, feed_forward=5120, patch=14))
    ),
    "resnet-50": Images(batch=256, job=partial(resnet_job, (3, 4, 6, 3))),
    "resnet-101": Images(batch=256, job=partial(resnet_job, (3, 4, 23, 3))),
    "resnet-152": Images(batch=256, job=partial(resnet_job, (3, 8, 36, 3))),
}


def preset_job(text: str) -> Job:
    """The job for `NAME` or `NAME:seq=TOKENS,batch=SAMPLES`."""
    name, options = split_options(text)
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        hint = f"Did you mean preset:{near}? " if near else ""
        raise JobError(f"There is no preset {name!r}. {hint}Use one of {', '.join(PRESETS)}.")
    return PRESETS[name].make(name, options)
