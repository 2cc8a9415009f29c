"""Jobs of families that no forecast of the project was tuned on, at sizes that fill a part of a large GPU.

Half are made from transformers' configs, half are plain PyTorch written here. Nothing is downloaded; data is random.
Names of classes are those of the task at hand, never known to the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import unseen_models as models
from torch import Tensor, nn

from meshwright import Job

Maker = Callable[[], Job]
JOBS: dict[str, Maker] = {}
VOCABULARY = 32000


def entry(name: str) -> Callable[[Maker], Maker]:
    def add(make: Maker) -> Maker:
        JOBS[name] = make
        return make

    return add


def job_of(name: str, batch: int) -> Job:
    return replace(JOBS[name](), global_batch=batch)


def job(model: Callable[[], nn.Module], inputs: Any, loss: Any, sample: Callable[[int], Any]) -> Job:
    return Job(
        model=model,
        inputs=inputs,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        sample=sample,
        global_batch=1,
        max_norm=1.0,
    )


def over_classes(output: Any, target: Tensor) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum"), target.numel()


def from_config(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    """A builder of a transformers model that keeps no cache."""

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**fields)
        made.use_cache = False
        return getattr(transformers, model)(made)

    return build


def tokens(model: Callable[[], nn.Module], length: int, vocabulary: int = VOCABULARY) -> Job:
    """Tokens in, the next token out."""
    return job(
        model,
        inputs=lambda batch: {"input_ids": batch[:, :-1]},
        loss=lambda output, batch: over_classes(output, batch[:, 1:]),
        sample=lambda count: torch.randint(vocabulary, (count, length + 1)),
    )


def classes(model: Callable[[], nn.Module], shape: tuple[int, ...], name: str | None, labels: int = 1000) -> Job:
    """One tensor in, one class out. `name`: of the model's argument, or None for the first."""
    return job(
        model,
        inputs=lambda batch: (batch["x"],) if name is None else {name: batch["x"]},
        loss=lambda output, batch: over_classes(output, batch["y"]),
        sample=lambda count: {"x": torch.randn(count, *shape), "y": torch.randint(labels, (count,))},
    )


def rebuilt(model: Callable[[], nn.Module], shape: tuple[int, ...], *others: Callable[[int], Tensor]) -> Job:
    """A tensor, and others beside it, in; a tensor of the same shape out."""

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch[0], reduction="sum"), output.numel()

    return job(
        model,
        inputs=lambda batch: tuple(batch),
        loss=loss,
        sample=lambda count: [torch.randn(count, *shape), *(make(count) for make in others)],
    )


@entry("pythia")
def _pythia() -> Job:
    fields = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 8192}
    return tokens(from_config("GPTNeoXForCausalLM", "GPTNeoXConfig", **fields, vocab_size=50304), 2048, 50304)


@entry("falcon")
def _falcon() -> Job:
    fields = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 50304}
    return tokens(from_config("FalconForCausalLM", "FalconConfig", **fields, multi_query=True), 2048, 50304)


@entry("opt")
def _opt() -> Job:
    fields = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
    return tokens(from_config("OPTForCausalLM", "OPTConfig", **fields, word_embed_proj_dim=2048), 2048)


@entry("phi3")
def _phi3() -> Job:
    fields = {"hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 8192}
    return tokens(from_config("Phi3ForCausalLM", "Phi3Config", **fields, vocab_size=32064, pad_token_id=0), 2048)


@entry("olmo2")
def _olmo2() -> Job:
    fields = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 8192}
    return tokens(from_config("Olmo2ForCausalLM", "Olmo2Config", **fields, vocab_size=100352), 4096)


@entry("granite-moe")
def _granite_moe() -> Job:
    fields = {
        "hidden_size": 1536,
        "intermediate_size": 512,
        "num_hidden_layers": 16,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 40,
        "num_experts_per_tok": 8,
    }
    return tokens(from_config("GraniteMoeForCausalLM", "GraniteMoeConfig", **fields, vocab_size=49152), 2048)


@entry("mamba2")
def _mamba2() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 32, "head_dim": 64, "n_groups": 1}
    return tokens(from_config("Mamba2ForCausalLM", "Mamba2Config", **fields, vocab_size=VOCABULARY), 1024)


@entry("deberta")
def _deberta() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    fields |= {"vocab_size": VOCABULARY, "relative_attention": True, "position_buckets": 256}
    build = from_config("DebertaV2ForMaskedLM", "DebertaV2Config", **fields, pos_att_type=["p2c", "c2p"])
    return tokens(build, 512)


@entry("bart")
def _bart() -> Job:
    build = from_config("BartForConditionalGeneration", "BartConfig", vocab_size=50265, max_position_embeddings=1024)

    def loss(output: Any, batch: Tensor) -> tuple[Tensor, int]:
        return over_classes(output, batch[:, 1])

    return job(
        build,
        inputs=lambda batch: {"input_ids": batch[:, 0], "decoder_input_ids": batch[:, 1]},
        loss=loss,
        sample=lambda count: torch.randint(3, 50265, (count, 2, 512)),
    )


@entry("convnext")
def _convnext() -> Job:
    fields = {"hidden_sizes": [192, 384, 768, 1536], "depths": [3, 3, 27, 3], "num_labels": 1000}
    build = from_config("ConvNextForImageClassification", "ConvNextConfig", **fields)
    return classes(build, (3, 224, 224), "pixel_values")


@entry("efficientnet")
def _efficientnet() -> Job:
    fields = {"width_coefficient": 1.4, "depth_coefficient": 1.8, "image_size": 380, "hidden_dim": 1792}
    build = from_config("EfficientNetForImageClassification", "EfficientNetConfig", **fields, num_labels=1000)
    return classes(build, (3, 380, 380), "pixel_values")


@entry("dinov2")
def _dinov2() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 224}
    build = from_config("Dinov2ForImageClassification", "Dinov2Config", **fields, patch_size=14, num_labels=1000)
    return classes(build, (3, 224, 224), "pixel_values")


@entry("audio-spectrogram")
def _audio_spectrogram() -> Job:
    build = from_config("ASTForAudioClassification", "ASTConfig", num_labels=527, max_length=1024)
    return classes(build, (1024, 128), "input_values", 527)


@entry("lstm")
def _lstm() -> Job:
    return job(
        lambda: models.RecurrentWords(VOCABULARY, 1536, 3),
        inputs=lambda batch: (batch[:, :-1],),
        loss=lambda output, batch: over_classes(output, batch[:, 1:]),
        sample=lambda count: torch.randint(VOCABULARY, (count, 513)),
    )


@entry("dit")
def _dit() -> Job:
    noise: tuple[Callable[[int], Tensor], ...] = (
        lambda count: torch.rand(count),
        lambda count: torch.randint(1000, (count,)),
    )
    return rebuilt(lambda: models.DiffusionTransformer(width=1152, depth=28, heads=16), (4, 32, 32), *noise)


@entry("mixer")
def _mixer() -> Job:
    return classes(lambda: models.Mixer(width=1024, depth=24, patches=196), (3, 224, 224), None)


@entry("codec")
def _codec() -> Job:
    return rebuilt(lambda: models.WaveCodec(channels=64), (1, 48000))


@entry("video")
def _video() -> Job:
    return classes(lambda: models.VideoNet(width=64), (3, 16, 112, 112), None, 400)


@entry("recommender")
def _recommender() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.binary_cross_entropy_with_logits(output, batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.Recommender(tables=26, rows=200_000, width=128),
        inputs=lambda batch: (batch["dense"], batch["ids"]),
        loss=loss,
        sample=lambda count: {
            "dense": torch.randn(count, 13),
            "ids": torch.randint(200_000, (count, 26)),
            "y": torch.rand(count),
        },
    )
