"""Jobs of the eighth round of unseen models: other families than the first seven rounds', and than the project's tests.

Layer drop, stochastic depth and masking of time steps are off, because they make a step's work random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import unseen_eighth_models as models
from torch import Tensor
from unseen_jobs import VOCABULARY, classes, entry, from_config, job, over_classes, tokens

from meshwright import Job


@entry("vaultgemma")
def _vaultgemma() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 18, "num_attention_heads": 8}
    fields |= {"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 65536, "sliding_window": 1024}
    return tokens(from_config("VaultGemmaForCausalLM", "VaultGemmaConfig", **fields), 2048, 65536)


@entry("modernbert-decoder")
def _modernbert_decoder() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 24}
    return tokens(from_config("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", **fields), 2048, 50280)


@entry("hrm-text")
def _hrm_text() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 12}
    return tokens(from_config("HrmTextForCausalLM", "HrmTextConfig", **fields, vocab_size=65536), 2048, 65536)


@entry("falcon-h1")
def _falcon_h1() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 12}
    fields |= {"num_key_value_heads": 4, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_state": 64}
    fields |= {"mamba_chunk_size": 64, "vocab_size": 32784, "key_multiplier": 0.5, "embedding_multiplier": 4.0}
    return tokens(from_config("FalconH1ForCausalLM", "FalconH1Config", **fields), 2048)


@entry("dbrx")
def _dbrx() -> Job:
    experts = {"ffn_hidden_size": 1536, "moe_num_experts": 16, "moe_top_k": 4, "hidden_size": 2048}
    attention = {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 500000.0}
    fields = {"d_model": 2048, "n_heads": 16, "n_layers": 12, "attn_config": attention, "ffn_config": experts}
    return tokens(from_config("DbrxForCausalLM", "DbrxConfig", **fields, vocab_size=32768), 2048)


@entry("zaya")
def _zaya() -> Job:
    fields = {"hidden_size": 1536, "moe_intermediate_size": 1536, "num_hidden_layers": 16, "vocab_size": 65536}
    return tokens(from_config("ZayaForCausalLM", "ZayaConfig", **fields), 2048, 65536)


@entry("imagegpt")
def _imagegpt() -> Job:
    fields = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024}
    return tokens(from_config("ImageGPTForCausalImageModeling", "ImageGPTConfig", **fields), 1024, 512)


@entry("xlm")
def _xlm() -> Job:
    fields = {"emb_dim": 2048, "n_layers": 12, "n_heads": 16, "vocab_size": 64000, "use_lang_emb": False}
    build = from_config("XLMWithLMHeadModel", "XLMConfig", **fields)
    return job(
        build,
        inputs=lambda batch: {"input_ids": batch["x"]},
        loss=lambda output, batch: over_classes(output, batch["y"]),
        sample=lambda count: {name: torch.randint(14, 64000, (count, 256)) for name in ("x", "y")},
    )


@entry("lilt")
def _lilt() -> Job:
    fields = {"max_position_embeddings": 514, "pad_token_id": 1, "vocab_size": 50265, "num_labels": 13}

    def sample(count: int) -> dict[str, Tensor]:
        corners = torch.randint(500, (count, 512, 2))
        boxes = torch.cat((corners, corners + torch.randint(500, (count, 512, 2))), dim=-1)
        return {"x": torch.randint(3, 50265, (count, 512)), "boxes": boxes, "y": torch.randint(13, (count, 512))}

    return job(
        from_config("LiltForTokenClassification", "LiltConfig", **fields),
        inputs=lambda batch: {"input_ids": batch["x"], "bbox": batch["boxes"]},
        loss=lambda output, batch: over_classes(output, batch["y"]),
        sample=sample,
    )


@entry("fsmt")
def _fsmt() -> Job:
    return job(
        from_config("FSMTForConditionalGeneration", "FSMTConfig"),
        inputs=lambda batch: {"input_ids": batch[:, 0, :-1], "decoder_input_ids": batch[:, 1, :-1]},
        loss=lambda output, batch: over_classes(output, batch[:, 1, 1:]),
        sample=lambda count: torch.randint(3, 42024, (count, 2, 257)),
    )


@entry("musicgen")
def _musicgen() -> Job:
    fields = {"hidden_size": 1536, "ffn_dim": 6144, "num_hidden_layers": 24, "num_attention_heads": 24}
    return job(
        from_config("MusicgenForCausalLM", "MusicgenDecoderConfig", **fields),
        inputs=lambda batch: {
            "input_ids": batch["x"][..., :-1].flatten(0, 1),
            "encoder_hidden_states": batch["text"],
        },
        loss=lambda output, batch: over_classes(output, batch["x"][..., 1:]),
        sample=lambda count: {"x": torch.randint(2048, (count, 4, 1501)), "text": torch.randn(count, 64, 1536)},
    )


@entry("sew-d")
def _sew_d() -> Job:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        chances = output.logits.float().log_softmax(dim=-1).transpose(0, 1)
        frames, letters = (torch.full_like(batch["y"][:, 0], size) for size in (len(chances), batch["y"].shape[1]))
        return F.ctc_loss(chances, batch["y"], frames, letters, 0, "sum", zero_infinity=True), len(batch["y"])

    fields = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    return job(
        from_config("SEWDForCTC", "SEWDConfig", **fields, apply_spec_augment=False, mask_time_prob=0.0),
        inputs=lambda batch: {"input_values": batch["x"]},
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 160000), "y": torch.randint(1, 32, (count, 100))},
    )


@entry("sam")
def _sam() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "initializer_range": 0.02}

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.last_hidden_state.float(), batch["y"], reduction="sum"), batch["y"].numel()

    return job(
        from_config("SamVisionModel", "SamVisionConfig", **fields, global_attn_indexes=[5, 11, 17, 23]),
        inputs=lambda batch: {"pixel_values": batch["x"]},
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 3, 1024, 1024), "y": torch.randn(count, 256, 64, 64)},
    )


@entry("glpn")
def _glpn() -> Job:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        apart = (output.predicted_depth.float() + 1e-6).log() - batch["depth"].log()
        means = apart.square().mean(dim=(1, 2)) - 0.5 * apart.mean(dim=(1, 2)).square()
        return means.sqrt().sum(), len(means)

    fields = {"hidden_sizes": [64, 128, 320, 512], "depths": [3, 8, 27, 3], "drop_path_rate": 0.0}
    return job(
        from_config("GLPNForDepthEstimation", "GLPNConfig", **fields),
        inputs=lambda batch: {"pixel_values": batch["x"]},
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 3, 448, 576), "depth": 0.5 + 9 * torch.rand(count, 448, 576)},
    )


@entry("llava")
def _llava() -> Job:
    patches, words, mark = 576, 448, 32000

    def build() -> Any:
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

        seen = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        said = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
        text = LlamaConfig(**said, num_key_value_heads=4, vocab_size=32064, use_cache=False)
        vision = CLIPVisionConfig(**seen, image_size=336, patch_size=14, projection_dim=768)
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=mark)
        config.use_cache = False
        model = LlavaForConditionalGeneration(config)
        model.model.vision_tower.requires_grad_(False)
        return model

    def sample(count: int) -> dict[str, Tensor]:
        said = torch.randint(3, mark, (count, words + 1))
        places = torch.full((count, patches), mark)
        return {"picture": torch.randn(count, 3, 336, 336), "x": torch.cat((places, said), dim=1)}

    return job(
        build,
        inputs=lambda batch: {"input_ids": batch["x"][:, :-1], "pixel_values": batch["picture"]},
        loss=lambda output, batch: over_classes(output.logits[:, patches:], batch["x"][:, patches + 1 :]),
        sample=sample,
    )


@entry("hgnet-v2")
def _hgnet_v2() -> Job:
    return classes(
        from_config("HGNetV2ForImageClassification", "HGNetV2Config", num_labels=1000), (3, 224, 224), "pixel_values"
    )


@entry("films")
def _films() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch["noise"] - batch["x"], reduction="sum"), output.numel()

    def inputs(batch: Any) -> tuple[Tensor, ...]:
        share = batch["time"][:, None, None, None, None]
        return (1 - share) * batch["x"] + share * batch["noise"], batch["time"], batch["text"]

    return job(
        lambda: models.Films(),
        inputs=inputs,
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 16, 4, 32, 32),
            "noise": torch.randn(count, 16, 4, 32, 32),
            "time": torch.rand(count),
            "text": torch.randn(count, 77, 1024),
        },
    )


@entry("robots")
def _robots() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch["noise"], reduction="sum"), output.numel()

    def inputs(batch: Any) -> tuple[Tensor, ...]:
        kept = torch.cos(batch["time"] * (torch.pi / 200)).square()[:, None, None]
        noisy = kept.sqrt() * batch["moves"] + (1 - kept).sqrt() * batch["noise"]
        return batch["views"], batch["joints"], noisy, batch["time"]

    return job(
        lambda: models.Robots(),
        inputs=inputs,
        loss=loss,
        sample=lambda count: {
            "views": torch.rand(count, 2, 2, 3, 224, 224),
            "joints": torch.randn(count, 2, 9),
            "moves": torch.rand(count, 16, 10) * 2 - 1,
            "noise": torch.randn(count, 16, 10),
            "time": torch.randint(100, (count,)),
        },
    )


@entry("associations")
def _associations() -> Job:
    return tokens(lambda: models.Associations(VOCABULARY), 2048)


@entry("spelling")
def _spelling() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        after, before = output
        first, count = over_classes(after.float(), batch["words"][:, 1:])
        second, _ = over_classes(before.float(), batch["words"][:, :-1])
        return 0.5 * (first + second), count

    return job(
        lambda: models.Spelling(words=100_000),
        inputs=lambda batch: (batch["letters"],),
        loss=loss,
        sample=lambda count: {
            "letters": torch.randint(262, (count, 65, 32)),
            "words": torch.randint(100_000, (count, 65)),
        },
    )


@entry("shuffles")
def _shuffles() -> Job:
    return classes(lambda: models.Shuffles(), (3, 224, 224), None)


@entry("voices")
def _voices() -> Job:
    return job(
        lambda: models.Voices(),
        inputs=lambda batch: (batch["x"], batch["y"]),
        loss=lambda output, batch: over_classes(output.float(), batch["y"]),
        sample=lambda count: {"x": torch.randn(count, 80, 300), "y": torch.randint(7205, (count,))},
    )


@entry("soft-experts")
def _soft_experts() -> Job:
    return classes(lambda: models.SoftExperts(), (3, 224, 224), None)


@entry("pooled-clips")
def _pooled_clips() -> Job:
    return classes(lambda: models.PooledClips(), (3, 16, 224, 224), None, 400)


@entry("compressed")
def _compressed() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
        shown, bits = output
        apart = (shown.float() - batch).square().mean(dim=(1, 2, 3))
        return (0.013 * 255**2 * apart + bits.float() / batch[0, 0].numel()).sum(), len(batch)

    return job(
        lambda: models.Compressed(),
        inputs=lambda batch: (batch,),
        loss=loss,
        sample=lambda count: torch.rand(count, 3, 256, 256),
    )


@entry("product-keys")
def _product_keys() -> Job:
    return tokens(lambda: models.ProductKeyWords(VOCABULARY), 1024)
