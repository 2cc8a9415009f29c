"""Jobs of the second round of unseen models: other families than the first's, at sizes that fill a part of a large GPU.

Layer drop and masking of time steps are off, because both make a step's work random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import unseen_second_models as models
from torch import Tensor
from unseen_jobs import VOCABULARY, classes, entry, from_config, job, over_classes, rebuilt, tokens

from meshwright import Job


@entry("nemotron")
def _nemotron() -> Job:
    fields = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8}
    fields |= {"intermediate_size": 8192, "vocab_size": 65536}
    return tokens(from_config("NemotronForCausalLM", "NemotronConfig", **fields), 2048, 65536)


@entry("codegen")
def _codegen() -> Job:
    fields = {"n_embd": 1024, "n_layer": 20, "n_head": 16, "rotary_dim": 32, "vocab_size": 51200}
    return tokens(from_config("CodeGenForCausalLM", "CodeGenConfig", **fields), 1024, 51200)


@entry("glm4")
def _glm4() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 2, "vocab_size": 65536, "pad_token_id": 0}
    return tokens(from_config("Glm4ForCausalLM", "Glm4Config", **fields), 2048, 65536)


@entry("eurobert")
def _eurobert() -> Job:
    fields = {"hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 26, "num_attention_heads": 18}
    fields |= {"num_key_value_heads": 6, "vocab_size": VOCABULARY}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1, "mask_token_id": 2}
    return tokens(from_config("EuroBertForMaskedLM", "EuroBertConfig", **fields, **special), 1024)


def _translation(model: str, config: str, vocabulary: int, length: int, **fields: Any) -> Job:
    return job(
        from_config(model, config, vocab_size=vocabulary, **fields),
        inputs=lambda batch: {"input_ids": batch[:, 0], "decoder_input_ids": batch[:, 1]},
        loss=lambda output, batch: over_classes(output, batch[:, 1]),
        sample=lambda count: torch.randint(3, vocabulary, (count, 2, length)),
    )


@entry("m2m100")
def _m2m100() -> Job:
    still = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    return _translation("M2M100ForConditionalGeneration", "M2M100Config", 64000, 512, **still)


@entry("umt5")
def _umt5() -> Job:
    fields = {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16, "d_kv": 64}
    return _translation("UMT5ForConditionalGeneration", "UMT5Config", VOCABULARY, 512, **fields)


@entry("focalnet")
def _focalnet() -> Job:
    fields = {"embed_dim": 128, "hidden_sizes": [256, 512, 1024, 1024], "depths": [2, 2, 18, 2], "num_labels": 1000}
    build = from_config("FocalNetForImageClassification", "FocalNetConfig", **fields, focal_levels=[3, 3, 3, 3])
    return classes(build, (3, 224, 224), "pixel_values")


@entry("hiera")
def _hiera() -> Job:
    fields = {"embed_dim": 144, "depths": [2, 6, 36, 4], "num_heads": [2, 4, 8, 16], "num_labels": 1000}
    return classes(from_config("HieraForImageClassification", "HieraConfig", **fields), (3, 224, 224), "pixel_values")


@entry("videomae")
def _videomae() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    build = from_config("VideoMAEForVideoClassification", "VideoMAEConfig", **fields, num_labels=400)
    return classes(build, (16, 3, 224, 224), "pixel_values", 400)


@entry("wavlm")
def _wavlm() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    fields |= {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
    build = from_config(
        "WavLMForSequenceClassification",
        "WavLMConfig",
        **fields,
        layerdrop=0.0,
        apply_spec_augment=False,
        num_labels=35,
    )
    return classes(build, (80000,), "input_values", 35)


@entry("w2v-bert")
def _w2v_bert() -> Job:
    still = {"layerdrop": 0.0, "apply_spec_augment": False, "num_labels": 35}
    build = from_config("Wav2Vec2BertForSequenceClassification", "Wav2Vec2BertConfig", **still)
    return classes(build, (512, 160), "input_features", 35)


@entry("ernie-moe")
def _ernie_moe() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 14, "num_attention_heads": 12}
    fields |= {"num_key_value_heads": 4, "moe_num_experts": 32, "moe_k": 4, "moe_intermediate_size": 768}
    build = from_config("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", **fields, vocab_size=VOCABULARY)
    return tokens(build, 2048)


@entry("lfm2")
def _lfm2() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 65536}
    attention = {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_attention_heads": 32, "num_key_value_heads": 8}
    return tokens(from_config("Lfm2ForCausalLM", "Lfm2Config", **fields, **attention), 2048, 65536)


@entry("minimax")
def _minimax() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": VOCABULARY}
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(12)]
    return tokens(from_config("MiniMaxForCausalLM", "MiniMaxConfig", **fields, layer_types=kinds), 2048)


@entry("densenet")
def _densenet() -> Job:
    return classes(lambda: models.DenseNet(growth=48, depths=(6, 12, 36, 24)), (3, 224, 224), None)


@entry("wavenet")
def _wavenet() -> Job:
    return job(
        lambda: models.WaveNet(channels=256, skipped=512, stacks=3, depth=10),
        inputs=lambda batch: (batch[:, :-1],),
        loss=lambda output, batch: over_classes(output, batch[:, 1:]),
        sample=lambda count: torch.randint(256, (count, 16001)),
    )


@entry("volume")
def _volume() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(output, batch["y"], reduction="sum"), batch["y"].numel()

    return job(
        lambda: models.VolumeNet(width=32, depth=5, labels=4),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 1, 96, 96, 96), "y": torch.randint(4, (count, 96, 96, 96))},
    )


@entry("speech")
def _speech() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        letters = output.float().log_softmax(dim=-1).transpose(0, 1)
        return F.ctc_loss(letters, batch["y"], batch["frames"], batch["letters"], reduction="sum"), len(batch["y"])

    return job(
        lambda: models.SpeechRecognizer(width=1024, layers=5, letters=29),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 160, 1000),
            "y": torch.randint(1, 29, (count, 120)),
            "frames": torch.full((count,), 500),
            "letters": torch.full((count,), 120),
        },
    )


@entry("molecules")
def _molecules() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.float(), batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.MoleculeNet(width=512, depth=12),
        inputs=lambda batch: (batch["atoms"], batch["ends"], batch["bonds"]),
        loss=loss,
        sample=lambda count: {
            "atoms": torch.randint(119, (count, 32)),
            "ends": torch.randint(32, (count, 2, 128)),
            "bonds": torch.randn(count, 128, 16),
            "y": torch.randn(count),
        },
    )


@entry("quantized")
def _quantized() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        images, apart = output
        return F.mse_loss(images.float(), batch, reduction="sum") + batch.numel() * apart, batch.numel()

    return job(
        lambda: models.QuantizedAutoencoder(width=128, codes=8192),
        inputs=lambda batch: (batch,),
        loss=loss,
        sample=lambda count: torch.randn(count, 3, 256, 256),
    )


@entry("fourier")
def _fourier() -> Job:
    return rebuilt(lambda: models.FourierOperator(width=64, modes=32, depth=8), (1, 256, 256))


@entry("points")
def _points() -> Job:
    return job(
        lambda: models.PointNet(width=64, labels=50),
        inputs=lambda batch: (batch["x"],),
        loss=lambda output, batch: over_classes(output, batch["y"]),
        sample=lambda count: {"x": torch.randn(count, 3, 4096), "y": torch.randint(50, (count, 4096))},
    )


@entry("sharpen")
def _sharpen() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.float(), batch["large"], reduction="sum"), output.numel()

    return job(
        lambda: models.Sharpener(width=256, depth=32),
        inputs=lambda batch: (batch["small"],),
        loss=loss,
        sample=lambda count: {"small": torch.rand(count, 3, 48, 48), "large": torch.rand(count, 3, 192, 192)},
    )


@entry("radiance")
def _radiance() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch[2], reduction="sum"), output.numel()

    return job(
        lambda: models.RadianceField(width=256, depth=8, points=128),
        inputs=lambda batch: (batch[0], batch[1]),
        loss=loss,
        sample=lambda count: [torch.randn(count, 3) for _ in range(3)],
    )


@entry("text-to-image")
def _text_to_image() -> Job:
    return rebuilt(
        lambda: models.TextToImage(width=1536, depth=18, heads=24),
        (16, 64, 64),
        lambda count: torch.randn(count, 154, 2048),
        lambda count: torch.rand(count),
    )
