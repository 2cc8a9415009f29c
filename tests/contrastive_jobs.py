"""Jobs whose loss compares the samples of a batch with each other: the way of CLIP, and that of SigLIP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.facts.job import Job

WIDTH, LENGTH, WORDS = 4, 5, 16


class Towers(nn.Module):
    """Two encoders and a learnt scale, small."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, WIDTH))
        self.text = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        return {
            "image": F.normalize(self.image(image), dim=-1),
            "text": F.normalize(self.text(text).mean(1), dim=-1),
            "scale": self.logit_scale.exp(),
        }


def clip_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output["scale"] * output["image"] @ output["text"].T
    targets = torch.arange(len(logits), device=logits.device)
    loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
    return loss * len(logits), len(logits)


def siglip_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    """Also with what kind a sample is of, which the batch says: samples of one kind belong together."""
    logits = output["scale"] * output["image"] @ output["text"].T
    same = batch["kind"][:, None] == batch["kind"][None]
    return -F.logsigmoid(torch.where(same, logits, -logits)).sum(), len(logits)


def sample(samples: int) -> dict[str, Tensor]:
    return {
        "image": torch.randn(samples, WIDTH),
        "text": torch.randint(0, WORDS, (samples, LENGTH)),
        "kind": torch.randint(0, 3, (samples,)),
    }


def item(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "image": torch.randn(WIDTH, generator=generator),
        "text": torch.randint(0, WORDS, (LENGTH,), generator=generator),
        "kind": torch.tensor(index % 3),
    }


def make(**parts: Any) -> Job:
    whole: dict[str, Any] = {
        "model": Towers,
        "inputs": lambda batch: (batch["image"], batch["text"]),
        "loss": clip_loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9),
        "data": lambda: [item(index) for index in range(22)],
        "sample": sample,
        "global_batch": 8,
        "max_norm": 1.0,
    }
    return Job(**whole | parts)


clip = make()
siglip = make(loss=siglip_loss)
declared = make(loss=siglip_loss, loss_over="batch")


class HuggingFace(nn.Module):
    """A model of transformers with two towers, which gives embeddings and its scale and bias."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers as hf

        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = {**small, "vocab_size": WORDS, "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 1}
        vision = {**small, "image_size": 8, "patch_size": 4}
        if kind == "clip":
            self.model: Any = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
        else:
            config = hf.SiglipConfig(text_config={**text, "projection_size": 16}, vision_config=vision)
            self.model = hf.SiglipModel(config)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        output = self.model(pixel_values=image, input_ids=text)
        bias = getattr(self.model, "logit_bias", torch.zeros((), device=image.device))
        return {
            "image": F.normalize(output.image_embeds, dim=-1),
            "text": F.normalize(output.text_embeds, dim=-1),
            "scale": self.model.logit_scale.exp(),
            "bias": bias * 1.0,
        }


def sigmoid_pairs(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output["scale"] * output["image"] @ output["text"].T + output["bias"]
    signs = 2 * torch.eye(len(logits), device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum(), len(logits)


def pictures(samples: int) -> dict[str, Tensor]:
    return {"image": torch.randn(samples, 3, 8, 8), "text": torch.randint(2, WORDS, (samples, LENGTH))}


hf_clip = make(model=lambda: HuggingFace("clip"), sample=pictures, data=None, global_batch=4)
hf_siglip = make(model=lambda: HuggingFace("siglip"), loss=sigmoid_pairs, sample=pictures, data=None, global_batch=4)


class Inside(Towers):
    """Computes the loss itself, as transformers does if asked."""

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        output = super().forward(image, text)
        total, count = clip_loss(output, None)
        return {"loss": total / count, **output}


inside = make(model=Inside, loss=lambda output, batch: (output["loss"] * len(batch["kind"]), len(batch["kind"])))
