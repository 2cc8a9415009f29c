"""A small Hugging Face vision transformer, built from its config, on images of 16 patches.

meshwright train examples/hf_vit.py --strategy pp=2:1f1b --ranks 2 --steps 60
meshwright train examples/hf_vit.py --strategy tp=2 --ranks 2 --steps 60
"""

from torch import Tensor
from torch.optim import AdamW
from transformers import ViTConfig, ViTForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

from images import CLASSES, SIDE, Images, class_loss, sample
from meshwright import Job


def build() -> ViTForImageClassification:
    config = ViTConfig(
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_size=64,
        intermediate_size=256,
        image_size=SIDE,
        patch_size=7,
        num_channels=1,
        num_labels=CLASSES,
        attn_implementation="sdpa",
    )
    return ViTForImageClassification(config)


def logits_loss(output: ImageClassifierOutput, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return class_loss(output.logits, batch)


job = Job(
    model=build,
    inputs=lambda batch: {"pixel_values": batch["x"]},
    loss=logits_loss,
    optimizer=lambda params: AdamW(params, lr=1e-3),
    max_norm=1.0,
    data=Images,
    sample=sample,
    global_batch=64,
)
