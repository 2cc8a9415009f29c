"""Jobs of the seventh round of unseen models: other families than the first six rounds', and than the project's tests.

Layer drop, stochastic depth and masking of time steps are off, because they make a step's work random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import unseen_seventh_models as models
from torch import Tensor
from unseen_jobs import VOCABULARY, classes, entry, from_config, job, over_classes, tokens

from meshwright import Job


@entry("afmoe")
def _afmoe() -> Job:
    fields = {"hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512, "num_hidden_layers": 16}
    fields |= {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 32, "num_experts_per_tok": 4}
    fields |= {"num_shared_experts": 1, "vocab_size": 65536, "mup_enabled": True}
    return tokens(from_config("AfmoeForCausalLM", "AfmoeConfig", **fields), 2048, 65536)


@entry("olmo-hybrid")
def _olmo_hybrid() -> Job:
    fields = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 12}
    fields |= {"vocab_size": 50304, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return tokens(from_config("OlmoHybridForCausalLM", "OlmoHybridConfig", **fields), 2048, 50304)


@entry("ernie45")
def _ernie45() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4}
    return tokens(from_config("Ernie4_5ForCausalLM", "Ernie4_5Config", **fields, vocab_size=65536), 2048, 65536)


@entry("hyperclovax")
def _hyperclovax() -> Job:
    fields = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 28, "num_attention_heads": 16}
    fields |= {"num_key_value_heads": 8, "embedding_multiplier": 10.0, "residual_multiplier": 0.2}
    return tokens(from_config("HyperCLOVAXForCausalLM", "HyperCLOVAXConfig", **fields), 2048, VOCABULARY)


@entry("nomic-bert")
def _nomic_bert() -> Job:
    fields = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    return tokens(from_config("NomicBertForMaskedLM", "NomicBertConfig", **fields), 512, 30528)


@entry("led")
def _led() -> Job:
    def sample(count: int) -> dict[str, Tensor]:
        return {"x": torch.randint(3, 50265, (count, 4096)), "y": torch.randint(3, 50265, (count, 257))}

    return job(
        from_config("LEDForConditionalGeneration", "LEDConfig"),
        inputs=lambda batch: {"input_ids": batch["x"], "decoder_input_ids": batch["y"][:, :-1]},
        loss=lambda output, batch: over_classes(output, batch["y"][:, 1:]),
        sample=sample,
    )


@entry("swin2sr")
def _swin2sr() -> Job:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        found = output.reconstruction
        return F.l1_loss(found.float(), batch["fine"], reduction="sum"), found.numel()

    return job(
        from_config("Swin2SRForImageSuperResolution", "Swin2SRConfig", drop_path_rate=0.0),
        inputs=lambda batch: {"pixel_values": batch["x"]},
        loss=loss,
        sample=lambda count: {"x": torch.rand(count, 3, 64, 64), "fine": torch.rand(count, 3, 128, 128)},
    )


@entry("big-transfer")
def _big_transfer() -> Job:
    fields = {"depths": [3, 4, 23, 3], "num_labels": 1000}
    return classes(from_config("BitForImageClassification", "BitConfig", **fields), (3, 224, 224), "pixel_values")


@entry("video-jepa")
def _video_jepa() -> Job:
    def sample(count: int) -> dict[str, Tensor]:
        places = torch.rand(count, 2048).argsort(dim=1)
        return {
            "clip": torch.randn(count, 16, 3, 256, 256),
            "shown": places[:, :1024],
            "hidden": places[:, 1024:],
            "y": torch.randn(count, 1024, 1024),
        }

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        found = output.predictor_output.last_hidden_state
        return F.l1_loss(found.float(), batch["y"], reduction="sum"), found.numel()

    return job(
        from_config("VJEPA2Model", "VJEPA2Config", frames_per_clip=16, pred_num_mask_tokens=1),
        inputs=lambda batch: {
            "pixel_values_videos": batch["clip"],
            "context_mask": [batch["shown"]],
            "target_mask": [batch["hidden"]],
        },
        loss=loss,
        sample=sample,
    )


@entry("wav2vec2-conformer")
def _wav2vec2_conformer() -> Job:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        chances = output.logits.float().log_softmax(dim=-1).transpose(0, 1)
        found = F.ctc_loss(chances, batch["y"], batch["frames"], batch["letters"], 0, "sum", zero_infinity=True)
        return found, len(batch["y"])

    fields = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    fields |= {"layerdrop": 0.0, "apply_spec_augment": False, "vocab_size": 32}
    return job(
        from_config("Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerConfig", **fields),
        inputs=lambda batch: {"input_values": batch["x"]},
        loss=loss,
        sample=lambda count: {
            "x": torch.randn(count, 160000),
            "y": torch.randint(1, 32, (count, 120)),
            "frames": torch.full((count,), 499),
            "letters": torch.full((count,), 120),
        },
    )


@entry("git")
def _git() -> Job:
    def build() -> Any:
        from transformers import GitConfig, GitForCausalLM, GitVisionConfig

        seen = GitVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
        config = GitConfig(vision_config=seen.to_dict(), num_hidden_layers=12)
        config.use_cache = False
        return GitForCausalLM(config)

    return job(
        build,
        inputs=lambda batch: {"input_ids": batch["y"][:, :-1], "pixel_values": batch["picture"]},
        loss=lambda output, batch: over_classes(output.logits[:, 197:], batch["y"][:, 1:]),
        sample=lambda count: {"picture": torch.randn(count, 3, 224, 224), "y": torch.randint(3, 30522, (count, 129))},
    )


@entry("autoformer")
def _autoformer() -> Job:
    fields = {"prediction_length": 96, "context_length": 336, "num_time_features": 4, "d_model": 512}
    fields |= {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "encoder_layers": 4, "decoder_layers": 2}
    fields |= {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    fields |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    names = ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features")

    def sample(count: int) -> dict[str, Tensor]:
        shapes = ((343,), (343, 4), (343,), (96,), (96, 4))
        values = {name: torch.randn(count, *shape) for name, shape in zip(names, shapes, strict=True)}
        return values | {"past_observed_mask": torch.ones(count, 343)}

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        count = batch["future_values"].numel()
        return output.loss * count, count

    return job(
        from_config("AutoformerForPrediction", "AutoformerConfig", **fields),
        inputs=lambda batch: {name: batch[name] for name in names},
        loss=loss,
        sample=sample,
    )


@entry("equilibrium")
def _equilibrium() -> Job:
    return classes(lambda: models.Equilibrium(), (3, 224, 224), None)


@entry("dreams")
def _dreams() -> Job:
    def loss(output: tuple[Tensor, ...], batch: Any) -> tuple[Tensor, int]:
        shown, reward, going, guesses, known = output
        apart = (shown.float() - batch["frames"]).square().sum(dim=(2, 3, 4))
        paid = F.cross_entropy(reward.float().flatten(0, 1), batch["rewards"].flatten(), reduction="sum")
        end = F.binary_cross_entropy_with_logits(going.float(), batch["going"], reduction="sum")
        between = models.divergence(known.detach(), guesses) + 0.1 * models.divergence(known, guesses.detach())
        return apart.sum() + paid + end + between.sum(), going.numel()

    return job(
        lambda: models.Dreams(),
        inputs=lambda batch: (batch["frames"], batch["actions"]),
        loss=loss,
        sample=lambda count: {
            "frames": torch.rand(count, 64, 3, 64, 64),
            "actions": F.one_hot(torch.randint(18, (count, 64)), 18).float(),
            "rewards": torch.randint(255, (count, 64)),
            "going": (torch.rand(count, 64) < 0.98).float(),
        },
    )


@entry("neighbours")
def _neighbours() -> Job:
    return job(
        lambda: models.Neighbours(),
        inputs=lambda batch: (batch["x"],),
        loss=lambda output, batch: over_classes(output.float(), batch["y"]),
        sample=lambda count: {"x": torch.randn(count, 2048, 3), "y": torch.randint(50, (count, 2048))},
    )


@entry("rotations")
def _rotations() -> Job:
    return classes(lambda: models.Rotations(), (3, 96, 96), None, 9)


@entry("forces")
def _forces() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        energy, forces = output
        apart = (forces - batch["forces"]).square().mean(dim=(1, 2))
        return ((energy - batch["energy"]).square() + 100 * apart).sum(), len(energy)

    return job(
        lambda: models.Forces(),
        inputs=lambda batch: (batch["kinds"], batch["atoms"], batch["places"]),
        loss=loss,
        sample=lambda count: {
            "kinds": torch.randint(1, 20, (count, 48)),
            "atoms": 3 * torch.randn(count, 48, 3),
            "places": (torch.arange(48)[:, None] + torch.randint(1, 48, (count, 48, 24))) % 48,
            "energy": torch.randn(count),
            "forces": torch.randn(count, 48, 3),
        },
    )


@entry("anchors")
def _anchors() -> Job:
    def sample(count: int) -> dict[str, Tensor]:
        return {
            "x": torch.rand(count, 3, 640, 640),
            "boxes": torch.rand(count, 8400, 4) * 8,
            "kinds": torch.randint(80, (count, 8400)),
            "there": (torch.rand(count, 8400) < 0.02).float(),
        }

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return models.box_loss(output, batch["boxes"], batch["kinds"], batch["there"]), len(output)

    return job(lambda: models.Anchors(), inputs=lambda batch: (batch["x"],), loss=loss, sample=sample)


@entry("nested")
def _nested() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        masks = batch["mask"].expand_as(output)
        return F.binary_cross_entropy_with_logits(output.float(), masks, reduction="sum"), batch["mask"].numel()

    return job(
        lambda: models.Nested(),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {
            "x": torch.rand(count, 3, 320, 320),
            "mask": (torch.rand(count, 1, 320, 320) < 0.3).float(),
        },
    )


@entry("trees")
def _trees() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch["y"], reduction="sum"), len(output)

    return job(
        lambda: models.Trees(columns=128),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 128), "y": torch.randn(count)},
    )


@entry("deflection")
def _deflection() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch["y"], reduction="sum"), output.numel()

    return job(
        lambda: models.Deflection(),
        inputs=lambda batch: (batch["fields"], batch["places"]),
        loss=loss,
        sample=lambda count: {
            "fields": torch.randn(count, 3, 128, 128),
            "places": torch.rand(count, 4096, 2),
            "y": torch.randn(count, 4096, 2),
        },
    )


@entry("histories")
def _histories() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return over_classes(output.float(), torch.zeros(output.shape[:2], dtype=torch.long, device=output.device))

    return job(
        lambda: models.Histories(items=500_000, length=1024),
        inputs=lambda batch: (batch["items"], batch["times"], batch["drawn"]),
        loss=loss,
        sample=lambda count: {
            "items": torch.randint(500_000, (count, 1025)),
            "times": torch.randint(86400, (count, 1025)).cumsum(dim=1),
            "drawn": torch.randint(500_000, (count, 256)),
        },
    )


@entry("planning")
def _planning() -> Job:
    def loss(output: tuple[Tensor, Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        policies, values, rewards = (each.float() for each in output)
        moves = F.cross_entropy(policies.flatten(0, 1), batch["visits"].flatten(0, 1), reduction="sum")
        worth = F.mse_loss(values.tanh(), batch["values"], reduction="sum")
        return moves + worth + F.mse_loss(rewards, batch["rewards"], reduction="sum"), len(values)

    return job(
        lambda: models.Planning(),
        inputs=lambda batch: (batch["boards"], batch["actions"]),
        loss=loss,
        sample=lambda count: {
            "boards": torch.randint(2, (count, 17, 19, 19)).float(),
            "actions": torch.randint(362, (count, 5)),
            "visits": torch.rand(count, 6, 362).softmax(dim=-1),
            "values": torch.rand(count, 6) * 2 - 1,
            "rewards": torch.randn(count, 5),
        },
    )


@entry("unmasking")
def _unmasking() -> Job:
    def sample(count: int) -> dict[str, Tensor]:
        words, share = torch.randint(VOCABULARY, (count, 1024)), torch.rand(count).clamp(min=0.05)
        hidden = torch.rand(count, 1024) < share[:, None]
        return {"x": words.masked_fill(hidden, VOCABULARY), "y": words, "hidden": hidden, "share": share}

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        each = F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="none").view_as(batch["y"])
        return (each * batch["hidden"] / batch["share"][:, None]).sum(), each.numel()

    return job(
        lambda: models.Unmasking(VOCABULARY),
        inputs=lambda batch: (batch["x"], batch["share"]),
        loss=loss,
        sample=sample,
    )


@entry("distilled")
def _distilled() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        said, known = (output[0].float() / 0.1).log_softmax(dim=-1), output[1]
        total = said.new_zeros(())
        for place in range(known.shape[1]):
            others = [cut for cut in range(said.shape[1]) if cut != place]
            with torch.no_grad():
                shares = models.balanced(known[:, place])
            total = total - (shares[:, None] * said[:, others]).sum(dim=(1, 2)).sum() / len(others)
        return total, len(said)

    return job(
        lambda: models.Distilled(),
        inputs=lambda batch: (batch["large"], batch["small"]),
        loss=loss,
        sample=lambda count: {"large": torch.randn(count, 2, 3, 224, 224), "small": torch.randn(count, 8, 3, 96, 96)},
    )


@entry("graphs")
def _graphs() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.l1_loss(output.float(), batch["y"], reduction="sum"), len(output)

    return job(
        lambda: models.Graphs(),
        inputs=lambda batch: (batch["kinds"], batch["degrees"], batch["ways"], batch["bonds"]),
        loss=loss,
        sample=lambda count: {
            "kinds": torch.randint(512, (count, 63, 9)),
            "degrees": torch.randint(8, (count, 63)),
            "ways": torch.randint(20, (count, 63, 63)),
            "bonds": torch.randint(64, (count, 63, 63, 5)),
            "y": torch.randn(count),
        },
    )


@entry("pyramid")
def _pyramid() -> Job:
    def loss(output: list[Tensor], batch: Any) -> tuple[Tensor, int]:
        total = batch["flow"].new_zeros(())
        for flow, weight in zip(output, (0.32, 0.08, 0.02, 0.01, 0.005), strict=True):
            rate = batch["flow"].shape[-1] // flow.shape[-1]
            target = F.avg_pool2d(batch["flow"], rate) / 20
            total = total + weight * (flow.float() - target).norm(dim=1).sum()
        return total, len(batch["flow"])

    return job(
        lambda: models.Pyramid(),
        inputs=lambda batch: (batch["first"], batch["second"]),
        loss=loss,
        sample=lambda count: {
            "first": torch.rand(count, 3, 384, 512),
            "second": torch.rand(count, 3, 384, 512),
            "flow": 5 * torch.randn(count, 2, 384, 512),
        },
    )


@entry("sound-codes")
def _sound_codes() -> Job:
    def loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
        found, apart = output
        total = models.spectra_apart(found, batch) + F.l1_loss(found.float(), batch) + apart.float()
        return total * len(batch), len(batch)

    return job(
        lambda: models.Codes(),
        inputs=lambda batch: (batch,),
        loss=loss,
        sample=lambda count: torch.randn(count, 1, 48000),
    )


@entry("scan")
def _scan() -> Job:
    return job(
        lambda: models.ScanWords(VOCABULARY),
        inputs=lambda batch: (batch[:, :-1],),
        loss=lambda output, batch: over_classes(output, batch[:, 1:]),
        sample=lambda count: torch.randint(VOCABULARY, (count, 2049)),
    )


@entry("slots")
def _slots() -> Job:
    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(output.float(), batch, reduction="sum"), len(batch)

    return job(
        lambda: models.Slots(),
        inputs=lambda batch: (batch,),
        loss=loss,
        sample=lambda count: torch.rand(count, 3, 128, 128),
    )


@entry("gates")
def _gates() -> Job:
    return job(
        lambda: models.Gates(VOCABULARY),
        inputs=lambda batch: (batch["x"],),
        loss=lambda output, batch: over_classes(output, batch["y"]),
        sample=lambda count: {name: torch.randint(VOCABULARY, (count, 512)) for name in ("x", "y")},
    )


@entry("few-shots")
def _few_shots() -> Job:
    return job(
        lambda: models.FewShots(),
        inputs=lambda batch: (batch["shown"], batch["labels"], batch["asked"]),
        loss=lambda output, batch: over_classes(output.float(), batch["y"]),
        sample=lambda count: {
            "shown": torch.randn(count, 25, 3, 84, 84),
            "labels": torch.arange(5).repeat(count, 5),
            "asked": torch.randn(count, 75, 3, 84, 84),
            "y": torch.randint(5, (count, 75)),
        },
    )


@entry("heartbeats")
def _heartbeats() -> Job:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.binary_cross_entropy_with_logits(output.float(), batch["y"], reduction="sum"), len(output)

    return job(
        lambda: models.Heartbeats(),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        sample=lambda count: {"x": torch.randn(count, 12, 2500), "y": torch.randint(2, (count, 71)).float()},
    )
