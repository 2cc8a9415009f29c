"""Architectures of Hugging Face transformers as tiny jobs, built from configs: nothing is downloaded. And a few habits.

Every config keeps its class's own choices (caches, dropout, tied weights) but for sizes and what draws at random which
layers or frames are left out. Habits are what authors of models do that is hard on a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from meshwright import Job
from zoo.judge import without_dropout

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 32, 4, 4, 64, 16
SIDE, CLASSES, MELS, FRAMES, SAMPLES = 16, 10, 8, 32, 400
BATCH = 8

TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
TRANSFORMER = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
TEXT = {**TOKENS, **TRANSFORMER, "max_position_embeddings": LENGTH}
WIDE = {**TEXT, "intermediate_size": 2 * WIDTH}
GROUPED = {**WIDE, "num_key_value_heads": HEADS // 2}
"""Two query heads for each head of keys and values."""
TWO_SIDED = {
    **{"d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "max_position_embeddings": LENGTH},
    **{"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, **TOKENS, "decoder_start_token_id": 0},
    **{"encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH},
}
IMAGE = {"image_size": SIDE, "patch_size": 4, "num_channels": 3, "num_labels": CLASSES}
VISION = {**TRANSFORMER, **IMAGE, "intermediate_size": 2 * WIDTH}


def build(name: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes))


def token_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    y = batch["y"]
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def masked_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Only masked places count, so the weight depends on the data."""
    each = F.cross_entropy(output.logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    counts = batch["masked"].flatten()
    return (each * counts).sum(), counts.sum()


def class_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output.logits, batch["y"], reduction="sum"), len(batch["y"])


def sample_text(n: int) -> dict[str, Tensor]:
    text = torch.randint(1, VOCABULARY, (n, LENGTH + 1))
    return {"x": text[:, :-1], "y": text[:, 1:]}


def sample_masked(n: int) -> dict[str, Tensor]:
    """Texts of several lengths, of which some places are hidden behind token 1."""
    y = torch.randint(2, VOCABULARY, (n, LENGTH))
    real = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (n, 1))
    masked = real & (torch.rand(n, LENGTH) < 0.3)
    return {"x": torch.where(masked, 1, y), "y": y, "real": real.long(), "masked": masked}


def sample_pairs(n: int) -> dict[str, Tensor]:
    return {"source": torch.randint(1, VOCABULARY, (n, LENGTH)), **sample_text(n)}


def sample_images(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, SIDE, SIDE), "y": torch.randint(CLASSES, (n,))}


def sample_speech(n: int) -> dict[str, Tensor]:
    return {"source": torch.randn(n, MELS, FRAMES), **sample_text(n)}


def sample_sound(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, SAMPLES), "y": torch.randint(CLASSES, (n,))}


def job(
    name: str,
    head: str,
    sizes: dict[str, Any],
    sample: Callable[[int], dict[str, Tensor]],
    loss: Callable[..., Any],
    **arguments: str,
) -> Job:
    """`arguments` are the model's, each with the part of the batch that it is given."""
    return Job(
        model=lambda: build(f"{name}{head}", sizes),
        inputs=lambda batch: {argument: batch[part] for argument, part in arguments.items()},
        loss=loss,
        optimizer=lambda params: AdamW(params, lr=1e-3),
        max_norm=1.0,
        sample=sample,
        global_batch=BATCH,
    )


def language(name: str, sizes: dict[str, Any], head: str = "ForCausalLM") -> Job:
    return job(name, head, sizes, sample_text, token_loss, input_ids="x")


def masked(name: str, sizes: dict[str, Any]) -> Job:
    return job(name, "ForMaskedLM", sizes, sample_masked, masked_loss, input_ids="x", attention_mask="real")


def translation(name: str, sizes: dict[str, Any], head: str = "ForConditionalGeneration") -> Job:
    return job(name, head, sizes, sample_pairs, token_loss, input_ids="source", decoder_input_ids="x")


def images(name: str, sizes: dict[str, Any]) -> Job:
    return job(name, "ForImageClassification", sizes, sample_images, class_loss, pixel_values="x")


GPT2_SIZES = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": LENGTH, **TOKENS}
GPT_NEO_SIZES = {
    **{"hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "window_size": 8, **TOKENS},
    **{"attention_types": [[["global", "local"], 2]], "max_position_embeddings": LENGTH},
}
FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
GPT_OSS_SIZES = {**GROUPED, **FEW_EXPERTS, "head_dim": 8, "num_local_experts": 4, "sliding_window": 8}
DEEPSEEK_SIZES = {
    **{**WIDE, **FEW_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2},
    **{"num_key_value_heads": HEADS, "q_lora_rank": 8, "kv_lora_rank": 8},
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
}
JAMBA_SIZES = {
    **{**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2},
    **{"mamba_d_state": 4, "use_mamba_kernels": False},
}
MAMBA_SIZES = {**TOKENS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 4}
MAMBA2_SIZES = {**MAMBA_SIZES, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
XLNET_SIZES = {"d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 2 * WIDTH, **TOKENS}
DISTILBERT_SIZES = {
    **{"dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": LAYERS, "n_heads": HEADS, **TOKENS},
    "max_position_embeddings": LENGTH,
}
PERCEIVER_SIZES = {
    **{"d_model": WIDTH, "d_latents": WIDTH, "qk_channels": WIDTH, "v_channels": WIDTH, "num_latents": 8},
    **{"num_self_attention_heads": HEADS, "num_cross_attention_heads": HEADS, "num_self_attends_per_block": LAYERS},
    **{"num_blocks": 1, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH},
}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
T5_SIZES = {
    **{"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS},
    **{**TOKENS, "decoder_start_token_id": 0},
}
SWITCH_SIZES = {
    **{**T5_SIZES, "num_decoder_layers": LAYERS, "num_experts": 4, "expert_capacity": 64, "router_jitter_noise": 0.0},
    **{"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
}
PROPHETNET_SIZES = {
    **{**TOKENS, "decoder_start_token_id": 0, "hidden_size": WIDTH, "max_position_embeddings": 2 * LENGTH},
    **{"num_encoder_layers": LAYERS, "num_encoder_attention_heads": HEADS, "encoder_ffn_dim": 2 * WIDTH},
    **{"num_decoder_layers": LAYERS, "num_decoder_attention_heads": HEADS, "decoder_ffn_dim": 2 * WIDTH},
}
WHISPER_SIZES = {
    **{**TWO_SIDED, "num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": LENGTH},
    **{"begin_suppress_tokens": None, "suppress_tokens": None},
}
SWIN_SIZES = {
    **{**IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    "drop_path_rate": 0.0,
}
SEGFORMER_SIZES = {
    **{"num_channels": 3, "num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]},
    **{"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
    **{"drop_path_rate": 0.0, "num_labels": CLASSES},
}
CONVNEXT_SIZES = {"num_channels": 3, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "num_labels": CLASSES}
RESNET_SIZES = {
    **{"num_channels": 3, "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"},
    "num_labels": CLASSES,
}
WAV2VEC2_SIZES = {
    **{**TRANSFORMER, "intermediate_size": 2 * WIDTH, "vocab_size": VOCABULARY, "num_labels": CLASSES},
    **{"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 8},
    **{"num_conv_pos_embedding_groups": 4, "classifier_proj_size": WIDTH},
    **{"layerdrop": 0.0, "apply_spec_augment": False},
}

ARCHITECTURES: dict[str, Job] = {
    "GPT-2": language("GPT2", GPT2_SIZES, "LMHeadModel"),
    "GPT-Neo": language("GPTNeo", GPT_NEO_SIZES),
    "GPT-J": language("GPTJ", {**GPT2_SIZES, "rotary_dim": 4}),
    "GPT-NeoX": language("GPTNeoX", WIDE),
    "GPT-BigCode": language("GPTBigCode", GPT2_SIZES),
    "OPT": language("OPT", {**TEXT, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "BLOOM": language("Bloom", {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, **TOKENS}),
    "Falcon": language("Falcon", TEXT),
    "MPT": language("Mpt", {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": LENGTH, **TOKENS}),
    "Llama": language("Llama", GROUPED),
    "Mistral": language("Mistral", {**GROUPED, "sliding_window": 8}),
    "Qwen2": language("Qwen2", GROUPED),
    "Qwen3": language("Qwen3", {**GROUPED, "head_dim": 8}),
    "Gemma 2": language("Gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
    "Gemma 3": language("Gemma3", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
    "Phi": language("Phi", WIDE),
    "Phi-3": language("Phi3", GROUPED),
    "OLMo 2": language("Olmo2", GROUPED),
    "StableLM": language("StableLm", GROUPED),
    "StarCoder 2": language("Starcoder2", GROUPED),
    "Cohere": language("Cohere", GROUPED),
    "Granite": language("Granite", GROUPED),
    "Mixtral": language("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "Qwen3-MoE": language("Qwen3Moe", {**GROUPED, **FEW_EXPERTS, "head_dim": 8, "num_experts": 4}),
    "GPT-OSS": language("GptOss", GPT_OSS_SIZES),
    "DeepSeek-V3": language("DeepseekV3", DEEPSEEK_SIZES),
    "Mamba": language("Mamba", MAMBA_SIZES),
    "Mamba 2": language("Mamba2", MAMBA2_SIZES),
    "Jamba": language("Jamba", JAMBA_SIZES),
    "RecurrentGemma": language("RecurrentGemma", {**GROUPED, "lru_width": WIDTH, "attention_window_size": 8}),
    "XLNet": language("XLNet", XLNET_SIZES, "LMHeadModel"),
    "BERT": masked("Bert", WIDE),
    "RoBERTa": masked("Roberta", {**WIDE, "max_position_embeddings": LENGTH + 1}),
    "DistilBERT": masked("DistilBert", DISTILBERT_SIZES),
    "ALBERT": masked("Albert", {**WIDE, "embedding_size": WIDTH}),
    "ELECTRA": masked("Electra", {**WIDE, "embedding_size": WIDTH}),
    "DeBERTa": masked("Deberta", {**WIDE, **DISENTANGLED}),
    "DeBERTa-v2": masked("DebertaV2", {**WIDE, **DISENTANGLED}),
    "ModernBERT": masked("ModernBert", {**WIDE, "cls_token_id": 0, "sep_token_id": 0}),
    "Longformer": masked("Longformer", {**WIDE, "attention_window": 4, "max_position_embeddings": LENGTH + 2}),
    "FNet": job("FNet", "ForMaskedLM", WIDE, sample_masked, masked_loss, input_ids="x"),
    "Perceiver": masked("Perceiver", PERCEIVER_SIZES),
    "T5": translation("T5", T5_SIZES),
    "Switch": translation("SwitchTransformers", SWITCH_SIZES),
    "ProphetNet": translation("ProphetNet", PROPHETNET_SIZES),
    "BART": translation("Bart", TWO_SIDED),
    "Marian": translation("Marian", TWO_SIDED, "MTModel"),
    "Pegasus": translation("Pegasus", TWO_SIDED),
    "Whisper": job(
        *("Whisper", "ForConditionalGeneration", WHISPER_SIZES, sample_speech, token_loss),
        input_features="source",
        decoder_input_ids="x",
    ),
    "Wav2Vec2": job(
        *("Wav2Vec2", "ForSequenceClassification", WAV2VEC2_SIZES, sample_sound, class_loss), input_values="x"
    ),
    "ViT": images("ViT", VISION),
    "DeiT": images("DeiT", VISION),
    "BEiT": images("Beit", {**VISION, "drop_path_rate": 0.0}),
    "DINOv2": images("Dinov2", {**VISION, "mlp_ratio": 2}),
    "Swin": images("Swin", SWIN_SIZES),
    "SegFormer": images("Segformer", SEGFORMER_SIZES),
    "ConvNeXt": images("ConvNext", CONVNEXT_SIZES),
    "ResNet": images("ResNet", RESNET_SIZES),
}


def find_job(name: str) -> Job:
    """For the judge, without what is random. Steps of SGD, because Adam makes a whole step of a rounding error."""
    job = {**ARCHITECTURES, **HABITS}[name]
    return without_dropout(replace(job, optimizer=lambda params: SGD(params, lr=0.02, momentum=0.9)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if hidden is None else y.masked_fill(hidden[..., None], 0.0))


class Plain(nn.Module):
    """Something to derive habits of authors from."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


class Masking(nn.Embedding):
    """Says beside its output which places are hidden, by a tensor that is neither floating nor differentiable."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x < 8


class Masked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.token = Masking(VOCABULARY, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.token(x)
        for block in self.blocks:
            y = block(y, hidden)
        return self.head(y)


class Looking(Plain):
    """Decides by values of the first block's output, which nothing else reads at the end, how to go on there."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](self.token(x))
        y = first
        for block in self.blocks[1:]:
            y = block(y)
        return self.head(y if first.any() else 2 * y)


class Recomputing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x)
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False)
        return self.head(y)


class Frozen(Plain):
    """Nothing of the first stage is trained."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.token, *self.blocks[:3]):
            module.requires_grad_(False)


class Counting(Block):
    """Returns a number that it reads off a tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward(x), int((x > 0).sum())


class Counted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.token(x), 0
        for block in self.blocks:
            y, count = block(y)
            total += count
        return self.head(y) + total


def plain_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def habit(model: type[nn.Module]) -> Job:
    return Job(
        model=model,
        inputs=lambda batch: (batch["x"],),
        loss=plain_loss,
        optimizer=lambda params: AdamW(params, lr=1e-3),
        sample=sample_text,
        global_batch=BATCH,
    )


HABITS = {kind.__name__: habit(kind) for kind in (Masked, Looking, Recomputing, Frozen, Counted)}
