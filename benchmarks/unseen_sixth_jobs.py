"""Jobs of the sixth round of unseen models: other families than the first five rounds', and than the project's tests.

Layer drop, stochastic depth and masking of time steps are off, because they make a step's work random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import unseen_sixth_models as models
from torch import Tensor
from unseen_jobs import VOCABULARY, classes, entry, from_config, job, over_classes, tokens

from meshwright import Job


@entry("jais2")
def _jais2() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
    fields |= {"vocab_size": 65536, "eos_token_id": 1}
    return tokens(from_config("Jais2ForCausalLM", "Jais2Config", **fields), 2048, 65536)


@entry("bitnet")
def _bitnet() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 4, "vocab_size": 50304, "bos_token_id": 1, "eos_token_id": 2}
    return tokens(from_config("BitNetForCausalLM", "BitNetConfig", **fields), 2048, 50304)


@entry("minicpm3")
def _minicpm3() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 24}
    fields |= {"num_key_value_heads": 24, "vocab_size": 73448, "initializer_range": 0.02}
    return tokens(from_config("MiniCPM3ForCausalLM", "MiniCPM3Config", **fields), 2048, 73448)


@entry("phimoe")
def _phimoe() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    fields |= {"num_key_value_heads": 4, "num_local_experts": 16, "max_position_embeddings": 4096}
    return tokens(from_config("PhimoeForCausalLM", "PhimoeConfig", **fields), 2048, VOCABULARY)


@entry("xlstm")
def _xlstm() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 16, "num_heads": 4, "mode": "train"}
    return tokens(from_config("xLSTMForCausalLM", "xLSTMConfig", **fields), 1024, 50304)


@entry("t5gemma")
def _t5gemma() -> Job:
    def build() -> Any:
        from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration, T5GemmaModuleConfig

        fields = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
        fields |= {"num_key_value_heads": 12, "head_dim": 64, "query_pre_attn_scalar": 64, "vocab_size": 65536}
        side = T5GemmaModuleConfig(**fields, use_cache=False)
        config = T5GemmaConfig(encoder=side.to_dict(), decoder=side.to_dict(), vocab_size=65536)
        config.use_cache = False
        return T5GemmaForConditionalGeneration(config)

    return job(
        build,
        inputs=lambda batch: {"input_ids": batch["x"], "decoder_input_ids": batch["y"][:, :-1]},
        loss=lambda output, batch: over_classes(output, batch["y"][:, 1:]),
        sample=lambda count: {
            "x": torch.randint(3, 65536, (count, 1024)),
            "y": torch.randint(3, 65536, (count, 257)),
        },
    )


@entry("rembert")
def _rembert() -> Job:
    return tokens(from_config("RemBertForMaskedLM", "RemBertConfig"), 512, 250300)


@entry("doge")
def _doge() -> Job:
    return tokens(from_config("DogeForCausalLM", "DogeConfig", num_hidden_layers=24), 2048, 32768)


@entry("layoutlmv3")
def _layoutlmv3() -> Job:
    fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    fields |= {"coordinate_size": 171, "shape_size": 170, "max_position_embeddings": 514, "num_labels": 13}

    def sample(count: int) -> dict[str, Tensor]:
        corner, size = torch.randint(900, (count, 512, 2)), torch.randint(1, 100, (count, 512, 2))
        return {
            "x": torch.randint(3, 50265, (count, 512)),
            "boxes": torch.cat((corner, corner + size), dim=-1),
            "page": torch.randn(count, 3, 224, 224),
            "y": torch.randint(13, (count, 512)),
        }

    return job(
        from_config("LayoutLMv3ForTokenClassification", "LayoutLMv3Config", **fields),
        inputs=lambda batch: {"input_ids": batch["x"], "bbox": batch["boxes"], "pixel_values": batch["page"]},
        loss=lambda output, batch: over_classes(output, batch["y"]),
        sample=sample,
    )


@entry("swiftformer")
def _swiftformer() -> Job:
    fields = {"depths": [4, 4, 12, 6], "embed_dims": [64, 128, 320, 512], "num_labels": 1000}
    build = from_config("SwiftFormerForImageClassification", "SwiftFormerConfig", **fields)
    return classes(build, (3, 224, 224), "pixel_values")


def _letters(output: Tensor, batch: Any, blank: int) -> tuple[Tensor, int]:
    """The loss of all alignments of letters to frames."""
    chances = output.float().log_softmax(dim=-1).transpose(0, 1)
    loss = F.ctc_loss(chances, batch["y"], batch["frames"], batch["letters"], blank, "sum", zero_infinity=True)
    return loss, len(batch["y"])


@entry("parakeet")
def _parakeet() -> Job:
    def build() -> Any:
        from transformers import ParakeetCTCConfig, ParakeetEncoderConfig, ParakeetForCTC

        encoder = ParakeetEncoderConfig(layerdrop=0.0)
        return ParakeetForCTC(ParakeetCTCConfig(encoder_config=encoder.to_dict()))

    return job(
        build,
        inputs=lambda batch: {"input_features": batch["x"]},
        loss=lambda output, batch: _letters(output.logits, batch, blank=1024),
        sample=lambda count: {
            "x": torch.randn(count, 1600, 80),
            "y": torch.randint(1024, (count, 60)),
            "frames": torch.full((count,), 200),
            "letters": torch.full((count,), 60),
        },
    )


@entry("pix2struct")
def _pix2struct() -> Job:
    def build() -> Any:
        from transformers import Pix2StructConfig, Pix2StructForConditionalGeneration

        return Pix2StructForConditionalGeneration(Pix2StructConfig())

    def sample(count: int) -> dict[str, Tensor]:
        places = torch.cartesian_prod(torch.arange(1.0, 33.0), torch.arange(1.0, 33.0))
        patches = torch.cat((places.expand(count, -1, -1), torch.randn(count, 1024, 768)), dim=-1)
        return {"x": patches, "y": torch.randint(3, 50244, (count, 129))}

    return job(
        build,
        inputs=lambda batch: {"flattened_patches": batch["x"], "decoder_input_ids": batch["y"][:, :-1]},
        loss=lambda output, batch: over_classes(output, batch["y"][:, 1:]),
        sample=sample,
    )


@entry("reader")
def _reader() -> Job:
    def loss(output: tuple[Tensor, Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        rough, fine, stop = output
        apart = sum(F.mse_loss(found.float(), batch["y"], reduction="sum") for found in (rough, fine))
        return apart + F.binary_cross_entropy_with_logits(stop.float(), batch["end"], reduction="sum"), rough.numel()

    return job(
        lambda: models.Reader(letters=148),
        inputs=lambda batch: (batch["x"], batch["y"]),
        loss=loss,
        sample=lambda count: {
            "x": torch.randint(148, (count, 160)),
            "y": torch.randn(count, 400, 80),
            "end": (torch.arange(200) > 190).float().repeat(count, 1),
        },
    )


@entry("painter")
def _painter() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch["noise"], reduction="sum"), output.numel()

    return job(
        lambda: models.Painter(),
        inputs=lambda batch: (batch["x"], batch["time"], batch["text"]),
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 4, 64, 64),
            "time": torch.randint(1000, (count,)),
            "text": torch.randn(count, 77, 768),
            "noise": torch.randn(count, 4, 64, 64),
        },
    )


@entry("poses")
def _poses() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        apart = (output.float() - batch["maps"]).square() * batch["seen"][:, :, None, None]
        return apart.sum(), output.numel()

    return job(
        lambda: models.Poses(),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 3, 256, 192),
            "maps": torch.rand(count, 17, 64, 48),
            "seen": (torch.rand(count, 17) < 0.8).float(),
        },
    )


@entry("actions")
def _actions() -> Job:
    return classes(lambda: models.Actions(), (3, 32, 224, 224), None, 400)


@entry("karaoke")
def _karaoke() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(*output, reduction="sum"), output[0].numel()

    return job(
        lambda: models.Karaoke(),
        inputs=lambda batch: (batch["song"], batch["singer"]),
        loss=loss,
        sample=lambda count: {"song": torch.randn(count, 2, 132300), "singer": torch.randn(count, 2, 132300)},
    )


@entry("long-filters")
def _long_filters() -> Job:
    return job(
        lambda: models.LongFilters(VOCABULARY, width=1024, depth=12, length=4096),
        inputs=lambda batch: (batch[:, :-1],),
        loss=lambda output, batch: over_classes(output, batch[:, 1:]),
        sample=lambda count: torch.randint(VOCABULARY, (count, 4097)),
    )


@entry("dispatched")
def _dispatched() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
        words, count = over_classes(output[0], batch[:, 1:])
        return words + 0.01 * count * output[1], count

    return job(
        lambda: models.DispatchedWords(VOCABULARY, width=1024, depth=12, length=1024),
        inputs=lambda batch: (batch[:, :-1],),
        loss=loss,
        sample=lambda count: torch.randint(VOCABULARY, (count, 1025)),
    )


@entry("weather")
def _weather() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        heights = torch.linspace(-1.55, 1.55, 90, device=output.device).cos().repeat_interleave(180)
        return ((output.float() - batch["later"]).square() * heights[:, None]).sum(), output.numel()

    return job(
        lambda: models.Weather(),
        inputs=lambda batch: (batch["now"],),
        loss=loss,
        sample=lambda count: {"now": torch.randn(count, 16200, 78), "later": torch.randn(count, 16200, 78)},
    )


@entry("twins")
def _twins() -> Job:
    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        same = output.float().diagonal()
        others = output.float().square().sum() - same.square().sum()
        return ((same - 1).square().sum() + 0.005 * others) * len(batch), len(batch)

    return job(
        lambda: models.Twins(),
        inputs=lambda batch: (batch,),
        loss=loss,
        sample=lambda count: torch.randn(count, 2, 3, 224, 224),
    )


@entry("advertising")
def _advertising() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.binary_cross_entropy_with_logits(output.float(), batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.Advertising(items=1_000_000, fields=10, rows=200_000),
        inputs=lambda batch: (batch["item"], batch["seen"], batch["fields"]),
        loss=loss,
        sample=lambda count: {
            "item": torch.randint(1, 1_000_000, (count,)),
            "seen": torch.randint(1_000_000, (count, 100)),
            "fields": torch.randint(200_000, (count, 10)),
            "y": torch.randint(2, (count, 2)).float(),
        },
    )


@entry("demand")
def _demand() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        quantiles = torch.tensor([0.1, 0.5, 0.9], device=output.device)
        short = batch["later"][..., None] - output.float()
        return torch.maximum(quantiles * short, (quantiles - 1) * short).sum(), output.numel()

    return job(
        lambda: models.Demand(past=8, known=4, kinds=(5000, 60, 40, 30, 10)),
        inputs=lambda batch: (batch["kinds"], batch["past"], batch["known"]),
        loss=loss,
        sample=lambda count: {
            "kinds": torch.randint(10, (count, 5)),
            "past": torch.randn(count, 168, 8),
            "known": torch.randn(count, 28, 4),
            "later": torch.randn(count, 28),
        },
    )


@entry("players")
def _players() -> Job:
    return job(
        lambda: models.Players(actions=18),
        inputs=lambda batch: (batch["screens"], batch["rewards"], batch["begun"]),
        loss=lambda output, batch: (models.player_loss(output, batch), batch["rewards"].numel()),
        sample=lambda count: {
            "screens": torch.randint(256, (count, 64, 4, 84, 84), dtype=torch.uint8),
            "rewards": torch.randn(count, 64),
            "begun": torch.rand(count, 64) < 0.02,
            "actions": torch.randint(18, (count, 64)),
            "old": -torch.rand(count, 64) - 2,
        },
    )


@entry("restore")
def _restore() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.float(), batch["clean"], reduction="sum"), output.numel()

    return job(
        lambda: models.Restore(),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.rand(count, 3, 128, 128), "clean": torch.rand(count, 3, 128, 128)},
    )


@entry("adapters")
def _adapters() -> Job:
    return job(
        lambda: models.AdaptedWords(VOCABULARY, width=2560, depth=28, heads=20),
        inputs=lambda batch: (batch[:, :-1],),
        loss=lambda output, batch: over_classes(output, batch[:, 1:]),
        sample=lambda count: torch.randint(VOCABULARY, (count, 1025)),
    )


@entry("surfaces")
def _surfaces() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.Surfaces(),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 16384, 7), "y": torch.randn(count, 16384, 4)},
    )
