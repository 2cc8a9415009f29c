"""Jobs of the third round of unseen models: other families than the first two rounds', and than the project's tests.

Layer drop, stochastic depth and masking of time steps are off, because they make a step's work random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import unseen_third_models as models
from torch import Tensor
from unseen_jobs import VOCABULARY, classes, entry, from_config, job, over_classes, tokens

from meshwright import Job

LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


@entry("xglm")
def _xglm() -> Job:
    fields = {"d_model": 1024, "ffn_dim": 4096, "num_layers": 24, "attention_heads": 16, "vocab_size": 65536}
    return tokens(from_config("XGLMForCausalLM", "XGLMConfig", **fields, layerdrop=0.0), 1024, 65536)


@entry("smollm3")
def _smollm3() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 4, "vocab_size": 65536, "pad_token_id": 0}
    return tokens(from_config("SmolLM3ForCausalLM", "SmolLM3Config", **fields), 2048, 65536)


@entry("persimmon")
def _persimmon() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 16}
    return tokens(from_config("PersimmonForCausalLM", "PersimmonConfig", **fields, vocab_size=65536), 2048, 65536)


@entry("helium")
def _helium() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 4224, "num_hidden_layers": 24, "num_attention_heads": 12}
    fields |= {"num_key_value_heads": 12, "head_dim": 128, "vocab_size": 48000}
    return tokens(from_config("HeliumForCausalLM", "HeliumConfig", **fields), 2048, 48000)


@entry("diffllama")
def _diffllama() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12}
    fields |= {"num_key_value_heads": 6, "vocab_size": VOCABULARY}
    return tokens(from_config("DiffLlamaForCausalLM", "DiffLlamaConfig", **fields), 2048)


@entry("roformer")
def _roformer() -> Job:
    fields = {**LARGE, "vocab_size": VOCABULARY, "embedding_size": 1024, "max_position_embeddings": 512}
    return tokens(from_config("RoFormerForMaskedLM", "RoFormerConfig", **fields), 512)


@entry("mpnet")
def _mpnet() -> Job:
    return tokens(from_config("MPNetForMaskedLM", "MPNetConfig", **LARGE, vocab_size=VOCABULARY), 510)


@entry("funnel")
def _funnel() -> Job:
    fields = {"block_sizes": [8, 8, 8], "d_model": 1024, "n_head": 16, "d_head": 64, "d_inner": 4096}
    build = from_config("FunnelForMaskedLM", "FunnelConfig", **fields, vocab_size=VOCABULARY)
    return tokens(build, 512)


@entry("convbert")
def _convbert() -> Job:
    fields = {**LARGE, "num_hidden_layers": 16, "embedding_size": 1024, "vocab_size": VOCABULARY}
    return tokens(from_config("ConvBertForMaskedLM", "ConvBertConfig", **fields), 512)


@entry("blenderbot")
def _blenderbot() -> Job:
    fields = {"d_model": 1280, "encoder_layers": 2, "decoder_layers": 16, "vocab_size": VOCABULARY}
    fields |= {f"{part}_attention_heads": 20 for part in ("encoder", "decoder")}
    fields |= {f"{part}_ffn_dim": 5120 for part in ("encoder", "decoder")}
    fields |= {f"{part}_layerdrop": 0.0 for part in ("encoder", "decoder")}
    build = from_config("BlenderbotForConditionalGeneration", "BlenderbotConfig", **fields, max_position_embeddings=512)
    return job(
        build,
        inputs=lambda batch: {"input_ids": batch[:, 0], "decoder_input_ids": batch[:, 1]},
        loss=lambda output, batch: over_classes(output, batch[:, 1]),
        sample=lambda count: torch.randint(3, VOCABULARY, (count, 2, 512)),
    )


@entry("qwen2-moe")
def _qwen2_moe() -> Job:
    fields = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 704}
    fields |= {"shared_expert_intermediate_size": 2816, "vocab_size": VOCABULARY}
    return tokens(from_config("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **fields), 2048)


@entry("jetmoe")
def _jetmoe() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 10, "num_key_value_heads": 8, "kv_channels": 64}
    fields |= {"intermediate_size": 2816, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": VOCABULARY}
    return tokens(from_config("JetMoeForCausalLM", "JetMoeConfig", **fields), 1024)


@entry("bamba")
def _bamba() -> Job:
    fields = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 8, "attn_layer_indices": [3, 7], "vocab_size": VOCABULARY}
    fields |= {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 64}
    return tokens(from_config("BambaForCausalLM", "BambaConfig", **fields), 1024)


@entry("pvt")
def _pvt() -> Job:
    fields = {"depths": [3, 8, 27, 3], "num_labels": 1000, "drop_path_rate": 0.0}
    return classes(from_config("PvtForImageClassification", "PvtConfig", **fields), (3, 224, 224), "pixel_values")


@entry("levit")
def _levit() -> Job:
    fields = {"hidden_sizes": [384, 512, 768], "num_attention_heads": [6, 9, 12], "key_dim": [32, 32, 32]}
    fields |= {"num_labels": 1000, "drop_path_rate": 0}
    return classes(from_config("LevitForImageClassification", "LevitConfig", **fields), (3, 224, 224), "pixel_values")


@entry("mobilevit")
def _mobilevit() -> Job:
    build = from_config("MobileViTForImageClassification", "MobileViTConfig", num_labels=1000)
    return classes(build, (3, 256, 256), "pixel_values")


@entry("regnet")
def _regnet() -> Job:
    fields = {"embedding_size": 32, "hidden_sizes": [224, 448, 896, 2240], "depths": [2, 5, 11, 1], "groups_width": 112}
    build = from_config("RegNetForImageClassification", "RegNetConfig", **fields, num_labels=1000)
    return classes(build, (3, 224, 224), "pixel_values")


@entry("swinv2")
def _swinv2() -> Job:
    fields = {"image_size": 256, "window_size": 8, "embed_dim": 128, "depths": [2, 2, 18, 2]}
    fields |= {"num_heads": [4, 8, 16, 32], "drop_path_rate": 0.0, "num_labels": 1000}
    return classes(from_config("Swinv2ForImageClassification", "Swinv2Config", **fields), (3, 256, 256), "pixel_values")


@entry("poolformer")
def _poolformer() -> Job:
    fields = {"depths": [6, 6, 18, 6], "hidden_sizes": [96, 192, 384, 768], "drop_path_rate": 0.0, "num_labels": 1000}
    build = from_config("PoolFormerForImageClassification", "PoolFormerConfig", **fields)
    return classes(build, (3, 224, 224), "pixel_values")


@entry("timesformer")
def _timesformer() -> Job:
    fields = {"num_frames": 8, "num_hidden_layers": 12, "drop_path_rate": 0, "num_labels": 400}
    build = from_config("TimesformerForVideoClassification", "TimesformerConfig", **fields)
    return classes(build, (8, 3, 224, 224), "pixel_values", 400)


@entry("unispeech")
def _unispeech() -> Job:
    still = {"layerdrop": 0.0, "apply_spec_augment": False, "num_labels": 35}
    build = from_config("UniSpeechForSequenceClassification", "UniSpeechConfig", **LARGE, **still)
    return classes(build, (80000,), "input_values", 35)


@entry("yolos")
def _yolos() -> Job:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        boxes = F.l1_loss(output.pred_boxes.float(), batch["boxes"], reduction="sum")
        kinds = F.cross_entropy(output.logits.flatten(0, 1), batch["kinds"].flatten(), reduction="sum")
        return kinds + boxes, batch["kinds"].numel()

    fields = {"image_size": [512, 512], "num_labels": 91, "use_mid_position_embeddings": False}
    return job(
        from_config("YolosForObjectDetection", "YolosConfig", **fields),
        inputs=lambda batch: {"pixel_values": batch["x"]},
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 3, 512, 512),
            "boxes": torch.rand(count, 100, 4),
            "kinds": torch.randint(92, (count, 100)),
        },
    )


@entry("patchtst")
def _patchtst() -> Job:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.prediction_outputs.float(), batch["y"], reduction="sum"), batch["y"].numel()

    fields = {"num_input_channels": 21, "context_length": 512, "patch_length": 16, "patch_stride": 8}
    fields |= {"d_model": 256, "num_attention_heads": 8, "ffn_dim": 1024, "num_hidden_layers": 6}
    return job(
        from_config("PatchTSTForPrediction", "PatchTSTConfig", **fields, prediction_length=96, loss="mse"),
        inputs=lambda batch: {"past_values": batch["x"]},
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 512, 21), "y": torch.randn(count, 96, 21)},
    )


@entry("translator")
def _translator() -> Job:
    return job(
        lambda: models.Translator(VOCABULARY, width=1024, layers=4),
        inputs=lambda batch: (batch[:, 0, :-1], batch[:, 1, :-1]),
        loss=lambda output, batch: over_classes(output, batch[:, 1, 1:]),
        sample=lambda count: torch.randint(VOCABULARY, (count, 2, 129)),
    )


@entry("long-memory")
def _long_memory() -> Job:
    return classes(lambda: models.LongMemory(width=512, depth=8, states=32, labels=10), (1024, 1), None, 10)


@entry("citations")
def _citations() -> Job:
    return job(
        lambda: models.Citations(features=500, width=512, depth=6, labels=40),
        inputs=lambda batch: (batch["nodes"], batch["edges"]),
        loss=lambda output, batch: over_classes(output, batch["y"]),
        sample=lambda count: {
            "nodes": torch.randn(count, 1000, 500),
            "edges": torch.randint(1000, (count, 2, 8000)),
            "y": torch.randint(40, (count, 1000)),
        },
    )


@entry("demixer")
def _demixer() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.float(), batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.Demixer(width=64, depth=5, sources=4),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 2, 65536), "y": torch.randn(count, 4, 2, 65536)},
    )


@entry("latents")
def _latents() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        images, apart = output
        return F.l1_loss(images.float(), batch, reduction="sum") + batch.numel() * apart, batch.numel()

    return job(
        lambda: models.LatentAutoencoder(width=128, levels=(1, 2, 4), latent=4),
        inputs=lambda batch: (batch,),
        loss=loss,
        sample=lambda count: torch.randn(count, 3, 256, 256),
    )


@entry("rows")
def _rows() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.TableTransformer(numbers=40, sizes=(1000,) * 10, width=256, depth=6),
        inputs=lambda batch: (batch["x"], batch["kinds"]),
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 40),
            "kinds": torch.randint(1000, (count, 10)),
            "y": torch.randn(count),
        },
    )


@entry("segments")
def _segments() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(output, batch["y"], reduction="sum"), batch["y"].numel()

    return job(
        lambda: models.Segments(width=64, labels=19),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 3, 512, 512), "y": torch.randint(19, (count, 512, 512))},
    )
