"""Jobs of the fifth round of unseen models: other families than the first four rounds', and than the project's tests.

Layer drop, stochastic depth and masking of time steps are off, because they make a step's work random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import unseen_fifth_models as models
from torch import Tensor
from unseen_jobs import VOCABULARY, classes, entry, from_config, job, over_classes, tokens

from meshwright import Job


@entry("apertus")
def _apertus() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 20, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 8, "vocab_size": 65536}
    return tokens(from_config("ApertusForCausalLM", "ApertusConfig", **fields), 2048, 65536)


@entry("hunyuan")
def _hunyuan() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 65536}
    return tokens(from_config("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", **fields), 2048, 65536)


@entry("olmo3")
def _olmo3() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
    return tokens(from_config("Olmo3ForCausalLM", "Olmo3Config", **fields, sliding_window=1024), 2048, 50304)


@entry("nanochat")
def _nanochat() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 12}
    return tokens(from_config("NanoChatForCausalLM", "NanoChatConfig", **fields), 2048, 50304)


@entry("flex-olmo")
def _flex_olmo() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    special = {"vocab_size": 50304, "pad_token_id": 1, "eos_token_id": 0}
    return tokens(from_config("FlexOlmoForCausalLM", "FlexOlmoConfig", **fields, **special), 2048, 50304)


@entry("zamba2")
def _zamba2() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 12, "n_mamba_heads": 32, "num_attention_heads": 16}
    fields |= {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 64}
    fields |= {"use_mem_rope": True, "vocab_size": VOCABULARY}
    kinds = ["hybrid" if layer % 3 == 2 else "linear_attention" for layer in range(12)]
    return tokens(from_config("Zamba2ForCausalLM", "Zamba2Config", **fields, layers_block_type=kinds), 1024)


@entry("mobilebert")
def _mobilebert() -> Job:
    return tokens(from_config("MobileBertForMaskedLM", "MobileBertConfig"), 512, 30522)


@entry("canine")
def _canine() -> Job:
    return job(
        from_config("CanineForTokenClassification", "CanineConfig", num_labels=35),
        inputs=lambda batch: {"input_ids": batch["x"]},
        loss=lambda output, batch: over_classes(output, batch["y"]),
        sample=lambda count: {"x": torch.randint(1, 0x10FFFF, (count, 2048)), "y": torch.randint(35, (count, 2048))},
    )


@entry("pegasus-x")
def _pegasus_x() -> Job:
    return job(
        from_config("PegasusXForConditionalGeneration", "PegasusXConfig"),
        inputs=lambda batch: {"input_ids": batch["x"], "decoder_input_ids": batch["y"][:, :-1]},
        loss=lambda output, batch: over_classes(output, batch["y"][:, 1:]),
        sample=lambda count: {
            "x": torch.randint(3, 96103, (count, 4096)),
            "y": torch.randint(3, 96103, (count, 257)),
        },
    )


@entry("dinov3")
def _dinov3() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    features = from_config("DINOv3ViTModel", "DINOv3ViTConfig", **fields, image_size=256, num_register_tokens=4)
    return classes(lambda: models.FeatureClassifier(features(), 1024, 1000), (3, 256, 256), None)


@entry("deformable-detr")
def _deformable_detr() -> Job:
    def build() -> Any:
        from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

        backbone = ResNetConfig(out_features=["stage2", "stage3", "stage4"])
        config = DeformableDetrConfig(backbone_config=backbone, num_labels=91)
        return DeformableDetrForObjectDetection(config)

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
            "boxes": torch.rand(count, 300, 4),
            "kinds": torch.randint(91, (count, 300)),
        },
    )


@entry("upernet")
def _upernet() -> Job:
    def build() -> Any:
        from transformers import ConvNextConfig, UperNetConfig, UperNetForSemanticSegmentation

        backbone = ConvNextConfig(hidden_sizes=[96, 192, 384, 768], out_features=[f"stage{n}" for n in range(1, 5)])
        config = UperNetConfig(backbone_config=backbone, auxiliary_in_channels=384, num_labels=150)
        return UperNetForSemanticSegmentation(config)

    return job(
        build,
        inputs=lambda batch: {"pixel_values": batch["x"], "labels": batch["y"]},
        loss=lambda output, batch: (output.loss * batch["y"].numel(), batch["y"].numel()),
        sample=lambda count: {"x": torch.randn(count, 3, 512, 512), "y": torch.randint(150, (count, 512, 512))},
    )


@entry("moonshine")
def _moonshine() -> Job:
    fields = {"hidden_size": 416, "intermediate_size": 1664}
    fields |= {f"{side}_num_hidden_layers": 8 for side in ("encoder", "decoder")}
    return job(
        from_config("MoonshineForConditionalGeneration", "MoonshineConfig", **fields),
        inputs=lambda batch: {"input_values": batch["x"], "decoder_input_ids": batch["y"][:, :-1]},
        loss=lambda output, batch: over_classes(output, batch["y"][:, 1:]),
        sample=lambda count: {"x": torch.randn(count, 160000), "y": torch.randint(3, 32768, (count, 129))},
    )


@entry("capsules")
def _capsules() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        lengths, rebuilt = output
        wanted = F.one_hot(batch["y"], lengths.shape[1]).float()
        margins = wanted * F.relu(0.9 - lengths).square() + 0.5 * (1 - wanted) * F.relu(lengths - 0.1).square()
        apart = F.mse_loss(rebuilt, batch["x"].flatten(1), reduction="sum")
        return margins.sum() + 0.0005 * apart, len(lengths)

    return job(
        lambda: models.Capsules(side=32, labels=10),
        inputs=lambda batch: (batch["x"], batch["y"]),
        loss=loss,
        sample=lambda count: {"x": torch.rand(count, 3, 32, 32), "y": torch.randint(10, (count,))},
    )


@entry("hash-grid")
def _hash_grid() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.huber_loss(output.float(), batch["colour"], reduction="sum", delta=0.1), output.numel()

    return job(
        lambda: models.HashField(points=128),
        inputs=lambda batch: (batch["begin"], batch["way"]),
        loss=loss,
        sample=lambda count: {
            "begin": torch.randn(count, 3),
            "way": torch.randn(count, 3),
            "colour": torch.rand(count, 3),
        },
    )


@entry("faces")
def _faces() -> Job:
    return job(
        lambda: models.Faces(people=200_000),
        inputs=lambda batch: (batch["x"], batch["y"]),
        loss=lambda output, batch: over_classes(output, batch["y"]),
        sample=lambda count: {"x": torch.randn(count, 3, 112, 112), "y": torch.randint(200_000, (count,))},
    )


@entry("stereo")
def _stereo() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        weights = torch.tensor([0.5, 0.7, 1.0], device=output.device)
        apart = F.smooth_l1_loss(output, batch["y"][:, None].expand_as(output), reduction="none")
        return (apart.sum(dim=(0, 2, 3)) * weights).sum(), batch["y"].numel()

    return job(
        lambda: models.Stereo(),
        inputs=lambda batch: (batch["left"], batch["right"]),
        loss=loss,
        sample=lambda count: {
            "left": torch.randn(count, 3, 256, 512),
            "right": torch.randn(count, 3, 256, 512),
            "y": 192 * torch.rand(count, 256, 512),
        },
    )


@entry("folding")
def _folding() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        apart, pairs = over_classes(output[0], batch["bins"])
        kinds, _ = over_classes(output[1], batch["kinds"])
        return apart + kinds, pairs

    return job(
        lambda: models.Folding(depth=16),
        inputs=lambda batch: (batch["kinds"],),
        loss=loss,
        sample=lambda count: {
            "kinds": torch.randint(21, (count, 256)),
            "bins": torch.randint(64, (count, 256, 256)),
        },
    )


@entry("equations")
def _equations() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        wrong, found = output
        apart = F.mse_loss(found.float(), batch["flow"], reduction="sum")
        return wrong.float().square().sum() + apart, len(wrong)

    return job(
        lambda: models.Equations(width=512, depth=8),
        inputs=lambda batch: (batch["points"], batch["known"]),
        loss=loss,
        sample=lambda count: {
            "points": torch.rand(count, 3),
            "known": torch.rand(count, 3),
            "flow": torch.randn(count, 3),
        },
    )


@entry("transducer")
def _transducer() -> Job:
    return job(
        lambda: models.Transducer(bands=80, pieces=1024),
        inputs=lambda batch: (batch["x"], batch["y"]),
        loss=lambda output, batch: (models.transducer_loss(output, batch["y"]), len(batch["y"])),
        sample=lambda count: {"x": torch.randn(count, 800, 80), "y": torch.randint(1, 1024, (count, 50))},
    )


@entry("pillars")
def _pillars() -> Job:
    rows, columns = 496, 432

    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        kinds, boxes = output
        chances = torch.sigmoid(kinds.float())
        missed = F.binary_cross_entropy_with_logits(kinds.float(), batch["kinds"], reduction="none")
        right = chances * batch["kinds"] + (1 - chances) * (1 - batch["kinds"])
        focal = ((1 - right).square() * missed).sum()
        return focal + F.smooth_l1_loss(boxes.float(), batch["boxes"], reduction="sum"), len(kinds)

    return job(
        lambda: models.Pillars(rows, columns),
        inputs=lambda batch: (batch["points"], batch["cells"]),
        loss=loss,
        sample=lambda count: {
            "points": torch.randn(count, 12000, 32, 9),
            "cells": torch.rand(count, rows * columns).topk(12000).indices,
            "kinds": (torch.rand(count, 18, rows // 2, columns // 2) < 0.01).float(),
            "boxes": torch.randn(count, 42, rows // 2, columns // 2),
        },
    )


@entry("pixels")
def _pixels() -> Job:
    return job(
        lambda: models.Pixels(width=160),
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (models.mixture_loss(output, batch), batch.numel()),
        sample=lambda count: torch.randint(256, (count, 3, 32, 32)) / 127.5 - 1,
    )


@entry("splines")
def _splines() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.Splines(inputs=128, width=1024, depth=5),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 128), "y": torch.randn(count)},
    )


@entry("genome")
def _genome() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.poisson_nll_loss(output.float(), batch["y"], log_input=False, reduction="sum"), output.numel()

    return job(
        lambda: models.Genome(width=768),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randint(4, (count, 131072)), "y": torch.rand(count, 1024, 5313)},
    )
