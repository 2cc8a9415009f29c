"""Jobs of the fourth round of unseen models: other families than the first three rounds', and than the project's tests.

Layer drop, stochastic depth and masking of time steps are off, because they make a step's work random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import unseen_fourth_models as models
from torch import Tensor
from unseen_jobs import VOCABULARY, classes, entry, from_config, job, over_classes, tokens

from meshwright import Job

BOTH_SIDES = ("encoder", "decoder")


@entry("cohere2")
def _cohere2() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 4, "sliding_window": 1024, "vocab_size": 65536}
    return tokens(from_config("Cohere2ForCausalLM", "Cohere2Config", **fields), 2048, 65536)


@entry("arcee")
def _arcee() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 65536, "bos_token_id": 1, "eos_token_id": 2}
    return tokens(from_config("ArceeForCausalLM", "ArceeConfig", **fields), 2048, 65536)


@entry("exaone4")
def _exaone4() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 12}
    fields |= {"num_key_value_heads": 4, "sliding_window": 1024, "vocab_size": 50304}
    return tokens(from_config("Exaone4ForCausalLM", "Exaone4Config", **fields), 2048, 50304)


@entry("seed-oss")
def _seed_oss() -> Job:
    fields = {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 28, "num_attention_heads": 20}
    fields |= {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 50304}
    still = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    return tokens(from_config("SeedOssForCausalLM", "SeedOssConfig", **fields, **still), 2048, 50304)


@entry("biogpt")
def _biogpt() -> Job:
    return tokens(from_config("BioGptForCausalLM", "BioGptConfig"), 1024, 42384)


@entry("dots1")
def _dots1() -> Job:
    fields = {"hidden_size": 1280, "intermediate_size": 3456, "moe_intermediate_size": 640, "num_hidden_layers": 12}
    fields |= {"num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 1, "n_routed_experts": 32}
    fields |= {"num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    return tokens(from_config("Dots1ForCausalLM", "Dots1Config", **fields, vocab_size=VOCABULARY), 2048)


@entry("megatron-bert")
def _megatron_bert() -> Job:
    return tokens(from_config("MegatronBertForMaskedLM", "MegatronBertConfig"), 512, 29056)


@entry("squeezebert")
def _squeezebert() -> Job:
    return tokens(from_config("SqueezeBertForMaskedLM", "SqueezeBertConfig", num_hidden_layers=24), 512, 30522)


@entry("nystromformer")
def _nystromformer() -> Job:
    fields = {"max_position_embeddings": 2048, "segment_means_seq_len": 2048, "num_landmarks": 64}
    return tokens(from_config("NystromformerForMaskedLM", "NystromformerConfig", **fields), 2048, 30000)


@entry("bigbird")
def _bigbird() -> Job:
    return tokens(from_config("BigBirdForMaskedLM", "BigBirdConfig", vocab_size=VOCABULARY), 2048)


@entry("esm")
def _esm() -> Job:
    fields = {"hidden_size": 1280, "num_hidden_layers": 24, "num_attention_heads": 20, "intermediate_size": 5120}
    fields |= {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
    return tokens(from_config("EsmForMaskedLM", "EsmConfig", **fields), 1024, 33)


def _texts(build: Any, vocabulary: int, length: int) -> Job:
    """A text in and a text out, of the same length."""
    return job(
        build,
        inputs=lambda batch: {"input_ids": batch[:, 0], "decoder_input_ids": batch[:, 1]},
        loss=lambda output, batch: over_classes(output, batch[:, 1]),
        sample=lambda count: torch.randint(3, vocabulary, (count, 2, length)),
    )


@entry("mbart")
def _mbart() -> Job:
    return _texts(from_config("MBartForConditionalGeneration", "MBartConfig"), 50265, 1024)


@entry("longt5")
def _longt5() -> Job:
    fields = {"d_model": 768, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "d_ff": 2048}
    fields |= {"encoder_attention_type": "transient-global", "local_radius": 127}
    return _texts(from_config("LongT5ForConditionalGeneration", "LongT5Config", **fields), 32128, 1024)


@entry("speech2text")
def _speech2text() -> Job:
    fields = {"d_model": 512, "vocab_size": 10000, "max_source_positions": 3000}
    fields |= {f"{side}_attention_heads": 8 for side in BOTH_SIDES}
    return job(
        from_config("Speech2TextForConditionalGeneration", "Speech2TextConfig", **fields),
        inputs=lambda batch: {"input_features": batch["x"], "decoder_input_ids": batch["y"][:, :-1]},
        loss=lambda output, batch: over_classes(output, batch["y"][:, 1:]),
        sample=lambda count: {"x": torch.randn(count, 1500, 80), "y": torch.randint(3, 10000, (count, 129))},
    )


@entry("hubert")
def _hubert() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    still = {"layerdrop": 0.0, "apply_spec_augment": False, "num_labels": 35}
    fields |= {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
    build = from_config("HubertForSequenceClassification", "HubertConfig", **fields, **still)
    return classes(build, (80000,), "input_values", 35)


@entry("cvt")
def _cvt() -> Job:
    fields = {"drop_path_rate": [0.0, 0.0, 0.0], "depth": [1, 4, 16], "num_labels": 1000}
    return classes(from_config("CvtForImageClassification", "CvtConfig", **fields), (3, 224, 224), "pixel_values")


@entry("mobilenet-v2")
def _mobilenet_v2() -> Job:
    build = from_config("MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=1.4, num_labels=1000)
    return classes(build, (3, 224, 224), "pixel_values")


@entry("convnextv2")
def _convnextv2() -> Job:
    fields = {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3], "num_labels": 1000}
    build = from_config("ConvNextV2ForImageClassification", "ConvNextV2Config", **fields)
    return classes(build, (3, 224, 224), "pixel_values")


@entry("dpt")
def _dpt() -> Job:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.predicted_depth.float(), batch["y"], reduction="sum"), batch["y"].numel()

    return job(
        from_config("DPTForDepthEstimation", "DPTConfig", use_auxiliary_head=False),
        inputs=lambda batch: {"pixel_values": batch["x"]},
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 3, 384, 384), "y": torch.rand(count, 384, 384)},
    )


@entry("vit-mae")
def _vit_mae() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return job(
        from_config("ViTMAEForPreTraining", "ViTMAEConfig", **fields),
        inputs=lambda batch: {"pixel_values": batch},
        loss=lambda output, batch: (output.loss * len(batch), len(batch)),
        sample=lambda count: torch.randn(count, 3, 224, 224),
    )


@entry("vivit")
def _vivit() -> Job:
    build = from_config("VivitForVideoClassification", "VivitConfig", num_frames=16, num_labels=400)
    return classes(build, (16, 3, 224, 224), "pixel_values", 400)


@entry("detr")
def _detr() -> Job:
    def build() -> Any:
        from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

        backbone = ResNetConfig(out_features=["stage4"])
        config = DetrConfig(backbone_config=backbone, num_queries=100, num_labels=91)
        return DetrForObjectDetection(config)

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        boxes = F.l1_loss(output.pred_boxes.float(), batch["boxes"], reduction="sum")
        kinds = F.cross_entropy(output.logits.flatten(0, 1), batch["kinds"].flatten(), reduction="sum")
        return kinds + boxes, batch["kinds"].numel()

    return job(
        build,
        inputs=lambda batch: {"pixel_values": batch["x"]},
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 3, 640, 640),
            "boxes": torch.rand(count, 100, 4),
            "kinds": torch.randint(92, (count, 100)),
        },
    )


@entry("patchtsmixer")
def _patchtsmixer() -> Job:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.prediction_outputs.float(), batch["y"], reduction="sum"), batch["y"].numel()

    fields = {"num_input_channels": 21, "context_length": 512, "patch_length": 16, "patch_stride": 8}
    fields |= {"d_model": 128, "num_layers": 8, "prediction_length": 96, "mode": "mix_channel", "loss": "mse"}
    return job(
        from_config("PatchTSMixerForPrediction", "PatchTSMixerConfig", **fields),
        inputs=lambda batch: {"past_values": batch["x"]},
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 512, 21), "y": torch.randn(count, 96, 21)},
    )


@entry("univnet")
def _univnet() -> Job:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.waveforms.float(), batch["y"], reduction="sum"), batch["y"].numel()

    return job(
        from_config("UnivNetModel", "UnivNetConfig"),
        inputs=lambda batch: {"input_features": batch["x"], "noise_sequence": batch["noise"]},
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 128, 100),
            "noise": torch.randn(count, 128, 64),
            "y": torch.randn(count, 128 * 256),
        },
    )


@entry("flow")
def _flow() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch["clean"] - batch["noise"], reduction="sum"), output.numel()

    def mixed(batch: Any) -> tuple[Tensor, Tensor]:
        times = batch["times"][:, None, None, None]
        return (1 - times) * batch["noise"] + times * batch["clean"], batch["times"]

    return job(
        lambda: models.FlowNet(width=192),
        inputs=mixed,
        loss=loss,
        sample=lambda count: {
            "clean": torch.randn(count, 3, 64, 64),
            "noise": torch.randn(count, 3, 64, 64),
            "times": torch.rand(count),
        },
    )


@entry("vocoder")
def _vocoder() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.float(), batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.Vocoder(bands=80, width=512),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 80, 64), "y": torch.randn(count, 1, 64 * 256)},
    )


@entry("retrieval")
def _retrieval() -> Job:
    def loss(output: tuple[Tensor, Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        asked, found, scale = output
        logits = (scale * asked @ found.T).float()
        targets = torch.arange(len(logits), device=logits.device)
        both = F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)
        return both * len(logits) / 2, len(logits)

    return job(
        lambda: models.Retrieval(words=VOCABULARY, features=100_000, width=768, depth=6),
        inputs=lambda batch: (batch["question"], batch["article"], batch["features"]),
        loss=loss,
        sample=lambda count: {
            "question": torch.randint(VOCABULARY, (count, 64)),
            "article": torch.randint(VOCABULARY, (count, 256)),
            "features": torch.randint(100_000, (count, 16)),
        },
    )


@entry("likelihood")
def _likelihood() -> Job:
    return job(
        lambda: models.NormalisingFlow(width=512, steps=16),
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (-output.sum(), batch.numel()),
        sample=lambda count: torch.rand(count, 3, 64, 64),
    )


@entry("continuous")
def _continuous() -> Job:
    return classes(lambda: models.Continuous(width=128, steps=6, labels=10), (3, 32, 32), None, 10)


@entry("boxes")
def _boxes() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        kinds, boxes = output
        wanted = F.one_hot(batch["kinds"], kinds.shape[-1]).float()
        chances = torch.sigmoid(kinds.float())
        missed = F.binary_cross_entropy_with_logits(kinds.float(), wanted, reduction="none")
        right = chances * wanted + (1 - chances) * (1 - wanted)
        focal = ((1 - right) ** 2 * missed).sum()
        return focal + F.smooth_l1_loss(boxes.float(), batch["boxes"], reduction="sum"), len(kinds)

    places = 9 * sum(side * side for side in (64, 32, 16, 8, 4))
    return job(
        lambda: models.Detector(labels=80),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 3, 512, 512),
            "kinds": torch.randint(80, (count, places)),
            "boxes": torch.randn(count, places, 4),
        },
    )


@entry("motion")
def _motion() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        weights = 0.8 ** torch.arange(len(output) - 1, -1, -1, device=output.device)
        apart = (output.float() - batch["y"]).abs().mean(dim=(2, 3, 4)).sum(dim=1)
        return (weights * apart).sum(), len(batch["y"])

    return job(
        lambda: models.Motion(width=128),
        inputs=lambda batch: (batch["first"], batch["second"]),
        loss=loss,
        sample=lambda count: {
            "first": torch.randn(count, 3, 320, 448),
            "second": torch.randn(count, 3, 320, 448),
            "y": torch.randn(count, 2, 320, 448),
        },
    )


@entry("next-frames")
def _next_frames() -> Job:
    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch[:, 1:], reduction="sum"), output.numel()

    return job(
        lambda: models.NextFrames(width=64, depth=3),
        inputs=lambda batch: (batch[:, :-1],),
        loss=loss,
        sample=lambda count: torch.rand(count, 13, 3, 64, 64),
    )


@entry("chosen-experts")
def _chosen_experts() -> Job:
    return job(
        lambda: models.ExpertWords(VOCABULARY, width=1024, depth=12, heads=16, experts=16),
        inputs=lambda batch: (batch[:, :-1],),
        loss=lambda output, batch: over_classes(output, batch[:, 1:]),
        sample=lambda count: torch.randint(VOCABULARY, (count, 1025)),
    )


@entry("retention")
def _retention() -> Job:
    return job(
        lambda: models.RetentionWords(VOCABULARY, width=1536, depth=16, heads=12),
        inputs=lambda batch: (batch[:, :-1],),
        loss=lambda output, batch: over_classes(output, batch[:, 1:]),
        sample=lambda count: torch.randint(VOCABULARY, (count, 2049)),
    )


@entry("atoms")
def _atoms() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.float(), batch["y"], reduction="sum"), len(output)

    return job(
        lambda: models.Atoms(kinds=100, width=128, depth=7),
        inputs=lambda batch: (batch["kinds"], batch["places"]),
        loss=loss,
        sample=lambda count: {
            "kinds": torch.randint(100, (count, 30)),
            "places": torch.randn(count, 30, 3),
            "y": torch.randn(count),
        },
    )


@entry("residual-series")
def _residual_series() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.float(), batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.ResidualStack(before=336, after=48, width=1024, blocks=24),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 336), "y": torch.randn(count, 48)},
    )


@entry("shopping")
def _shopping() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        right, wrong = output.float()[..., :1], output.float()[..., 1:]
        return -(F.logsigmoid(right).sum() + F.logsigmoid(-wrong).sum()), right.numel()

    return job(
        lambda: models.Shopping(things=500_000, width=256, depth=4, length=200),
        inputs=lambda batch: (batch["bought"], batch["asked"]),
        loss=loss,
        sample=lambda count: {
            "bought": torch.randint(1, 500_000, (count, 200)),
            "asked": torch.randint(1, 500_000, (count, 200, 8)),
        },
    )
