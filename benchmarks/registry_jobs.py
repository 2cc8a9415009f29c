"""Models of packages from the registry as tiny jobs: nothing is downloaded, and no name of them is in the library.

Most are built from configs; some come through `from_pretrained` of a folder that is made here. Dropout is off.

pip install --no-deps timm diffusers peft segmentation-models-pytorch torch-geometric x-transformers \
    einx einops loguru frozendict torch-einops-utils aiohttp

timm and segmentation-models-pytorch import torchvision: install one that fits your torch, or carry its Python files.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Job

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # architectures of transformers are the tests' own

from architecture_jobs import ARCHITECTURES
from zoo.builders import leave_folder
from zoo.judge import without_dropout

CLASSES, VOCABULARY, LENGTH, BATCH = 5, 32, 8, 4
_FOLDER = tempfile.TemporaryDirectory(prefix="meshwright-registry-")

Maker = Callable[[], Job]
JOBS: dict[str, Maker] = {}


def entry(name: str) -> Callable[[Maker], Maker]:
    def add(make: Maker) -> Maker:
        JOBS[name] = make
        return make

    return add


def find_job(name: str) -> Job:
    optimizer = lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9)  # noqa: E731
    return without_dropout(replace(JOBS[name](), optimizer=optimizer, max_norm=1.0))


def job(
    model: Callable[[], nn.Module], sample: Callable[[int], Any], loss: Any, inputs: Any = None, **rest: Any
) -> Job:
    return Job(
        model=model,
        inputs=inputs or (lambda batch: (batch["x"],)),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
        sample=sample,
        global_batch=BATCH,
        **rest,
    )


def images_of(side: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {"x": torch.randn(n, 3, side, side), "y": torch.randint(CLASSES, (n,))}


def class_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"])


def tokens(n: int) -> dict[str, Tensor]:
    text = torch.randint(1, VOCABULARY, (n, LENGTH + 1))
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


def token_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def denoising_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output.sample, batch["y"], reduction="sum"), batch["y"].numel()


# timm


def timm_model(name: str, side: int = 32, **sizes: Any) -> Job:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **sizes)

    return job(build, images_of(side), class_loss)


TIMM = {
    "timm EfficientNet": ("test_efficientnet", {}),
    "timm ResNet": ("test_resnet", {}),
    "timm ConvNeXt": ("test_convnext", {}),
    "timm ViT with registers": ("test_vit3", {"img_size": 32, "reg_tokens": 2}),
    "timm NFNet": ("test_nfnet", {}),
    "timm ByobNet": ("test_byobnet", {}),
    "timm Swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
    ),
}
for _name, (_model, _sizes) in TIMM.items():
    JOBS[_name] = lambda m=_model, s=_sizes: timm_model(m, s.get("img_size", 32), **s)  # type: ignore[misc]


@entry("timm Mixer")
def mixer() -> Job:
    def build() -> nn.Module:
        from timm.models.mlp_mixer import MlpMixer

        return MlpMixer(num_classes=CLASSES, img_size=32, patch_size=8, num_blocks=4, embed_dim=16)

    return job(build, images_of(32), class_loss)


@entry("timm MaxViT")
def maxvit() -> Job:
    def build() -> nn.Module:
        from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg

        inner = MaxxVitTransformerCfg(dim_head=8, window_size=(4, 4), grid_size=(4, 4))
        cfg = MaxxVitCfg(embed_dim=(16, 32), depths=(1, 1), block_type=("M", "M"), stem_width=8, transformer_cfg=inner)
        return MaxxVit(cfg, img_size=32, num_classes=CLASSES)

    return job(build, images_of(32), class_loss)


# diffusers


def noises(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 16, 16), "t": torch.randint(1000, (n,)), "y": torch.randn(n, 3, 16, 16)}


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


@entry("diffusers UNet2D")
def diffusers_unet() -> Job:
    return job(unet, noises, denoising_loss, lambda batch: (batch["x"], batch["t"]))


@entry("diffusers UNet2D, recomputed")
def diffusers_recomputed() -> Job:
    def build() -> nn.Module:
        model = unet()
        model.enable_gradient_checkpointing()
        return model

    return job(build, noises, denoising_loss, lambda batch: (batch["x"], batch["t"]))


@entry("diffusers conditional UNet")
def conditional_unet() -> Job:
    def build() -> nn.Module:
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(
            sample_size=16,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            layers_per_block=1,
            attention_head_dim=2,
            cross_attention_dim=16,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )

    def sample(n: int) -> dict[str, Tensor]:
        return {**noises(n), "text": torch.randn(n, 4, 16)}

    return job(build, sample, denoising_loss, lambda batch: (batch["x"], batch["t"], batch["text"]))


@entry("diffusers DiT")
def dit() -> Job:
    def build() -> nn.Module:
        from diffusers import DiTTransformer2DModel

        return DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=3,
            out_channels=3,
            num_layers=4,
            norm_num_groups=1,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=10,
            norm_type="ada_norm_zero",
        )

    def sample(n: int) -> dict[str, Tensor]:
        labels = torch.randint(10, (n,))
        return {
            "x": torch.randn(n, 3, 8, 8),
            "t": torch.randint(1000, (n,)),
            "label": labels,
            "y": torch.randn(n, 3, 8, 8),
        }

    return job(build, sample, denoising_loss, lambda batch: (batch["x"], batch["t"], batch["label"]))


@entry("diffusers AutoencoderKL")
def autoencoder() -> Job:
    def build() -> nn.Module:
        from diffusers import AutoencoderKL

        return AutoencoderKL(
            block_out_channels=(8, 16),
            norm_num_groups=4,
            latent_channels=2,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )

    return job(build, noises, denoising_loss)


# peft


LLAMA = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0},
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA, use_cache=False))


@entry("peft LoRA on a Llama")
def lora() -> Job:
    def build() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        return get_peft_model(llama(), config)

    return job(build, tokens, token_loss, lambda batch: {"input_ids": batch["x"]})


@entry("peft IA3 on a Llama")
def ia3() -> Job:
    def build() -> nn.Module:
        from peft import IA3Config, get_peft_model

        config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
        return get_peft_model(llama(), config)

    return job(build, tokens, token_loss, lambda batch: {"input_ids": batch["x"]})


@entry("peft DoRA on a Llama")
def dora() -> Job:
    def build() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(llama(), LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "up_proj"]))

    return job(build, tokens, token_loss, lambda batch: {"input_ids": batch["x"]})


# segmentation_models_pytorch


def pixels_of(side: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {"x": torch.randn(n, 3, side, side), "y": torch.randint(CLASSES, (n, side, side))}


def pixel_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"], reduction="sum"), batch["y"].numel()


def segmentation(kind: str, encoder: str) -> Job:
    def build() -> nn.Module:
        import segmentation_models_pytorch as smp

        sizes = {"decoder_channels": (16, 8, 8), "encoder_depth": 3} if kind == "Unet" else {}
        return getattr(smp, kind)(encoder_name=encoder, encoder_weights=None, classes=CLASSES, **sizes)

    return job(build, pixels_of(32), pixel_loss)


JOBS["segmentation U-Net on EfficientNet"] = lambda: segmentation("Unet", "tu-test_efficientnet")
JOBS["segmentation U-Net on ResNet"] = lambda: segmentation("Unet", "tu-test_resnet")


# torch_geometric


def graphs(n: int) -> Any:
    from torch_geometric.data import Batch, Data

    rows = []
    for index in range(n):
        nodes = 3 + index % 3
        edges = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
        rows.append(Data(x=torch.randn(nodes, 6), edge_index=edges, y=torch.randint(CLASSES, (1,))))
    return Batch.from_data_list(rows)


class GraphNetwork(nn.Module):
    def __init__(self, kind: str) -> None:
        from torch_geometric import nn as geometric

        super().__init__()
        self.body = getattr(geometric, kind)(6, 8, num_layers=2)
        self.pool = geometric.global_mean_pool
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, owner: Tensor, size: int) -> Tensor:
        return self.head(self.pool(self.body(x, edges), owner, size))


def graph_job(kind: str) -> Job:
    return job(
        lambda: GraphNetwork(kind),
        graphs,
        lambda output, batch: (F.cross_entropy(output, batch.y, reduction="sum"), len(batch.y)),
        lambda batch: (batch.x, batch.edge_index, batch.batch, batch.num_graphs),
    )


JOBS["torch_geometric GCN"] = lambda: graph_job("GCN")
JOBS["torch_geometric GAT"] = lambda: graph_job("GAT")


# x-transformers


def x_wrapper(kind: str, **habits: Any) -> Job:
    def build() -> nn.Module:
        import x_transformers

        layers = getattr(x_transformers, kind)(dim=16, depth=4, heads=2, attn_dim_head=8, **habits)
        return x_transformers.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers)

    return job(build, tokens, token_loss)


JOBS["x-transformers decoder"] = lambda: x_wrapper("Decoder", rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
JOBS["x-transformers encoder"] = lambda: x_wrapper("Encoder", rel_pos_bias=True, attn_qk_norm=True)


# transformers


def pairs(n: int) -> dict[str, Tensor]:
    text = torch.randint(1, VOCABULARY, (n, LENGTH))
    text[:, -1] = VOCABULARY - 1  # where CLIP's text tower reads its output
    return {"pixels": torch.randn(n, 3, 16, 16), "text": text}


def contrastive_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    scores, n = output.logits_per_image, len(batch["text"])
    target = torch.arange(n)
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2 * n, n


def sigmoid_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    scores, n = output.logits_per_text, len(batch["text"])
    return -F.logsigmoid(scores * (2 * torch.eye(n).to(scores) - 1)).sum(), n


def two_towers(kind: str, loss: Any) -> Job:
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**text, "image_size": 16, "patch_size": 8}
    text |= {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": VOCABULARY - 1}

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, kind)
        return made(made.config_class(text_config=dict(text), vision_config=dict(vision)))

    return job(build, pairs, loss, lambda batch: {"input_ids": batch["text"], "pixel_values": batch["pixels"]})


JOBS["transformers CLIP"] = lambda: two_towers("CLIPModel", contrastive_loss)
JOBS["transformers SigLIP"] = lambda: two_towers("SiglipModel", sigmoid_loss)

SHARED = (
    *("ViT", "Swin", "ResNet", "Whisper", "Wav2Vec2", "BERT", "T5", "Llama", "Qwen3", "Qwen3-MoE", "Mixtral"),
    *("Mamba", "GPT-2", "StableLM"),
)
for _name in SHARED:
    JOBS[f"transformers {_name}"] = lambda n=_name: ARCHITECTURES[n]  # type: ignore[misc]


# from_pretrained


@cache
def folder(name: str) -> str:
    """A folder as `save_pretrained` leaves it, or a file of timm's."""
    path = str(Path(_FOLDER.name) / name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        _save(name, path)
    return path


def _save(name: str, path: str) -> None:
    if name == "llama":
        leave_folder(llama(), path)
    elif name == "bert":
        leave_folder(_bert(), path)
    elif name == "unet":
        unet().save_pretrained(path)
    elif name == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        get_peft_model(llama(), config).save_pretrained(path)
    else:
        import timm

        torch.save(timm.create_model("test_vit", num_classes=CLASSES, img_size=32).state_dict(), path)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    return BertForMaskedLM(BertConfig(**sizes))


def load(kind: str, path: str) -> nn.Module:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return getattr(transformers, kind).from_pretrained(path, dtype=torch.float32)


def ids(batch: Any) -> dict[str, Tensor]:
    return {"input_ids": batch["x"]}


@entry("from_pretrained: transformers Llama")
def loaded_llama() -> Job:
    path = folder("llama")
    return job(lambda: load("LlamaForCausalLM", path), tokens, token_loss, ids)


@entry("from_pretrained: transformers BERT")
def loaded_bert() -> Job:
    path = folder("bert")
    return job(lambda: load("BertForMaskedLM", path), tokens, token_loss, ids)


@entry("from_pretrained: diffusers UNet2D")
def loaded_unet() -> Job:
    path = folder("unet")

    def build() -> nn.Module:
        from diffusers import UNet2DModel

        return UNet2DModel.from_pretrained(path)

    return job(build, noises, denoising_loss, lambda batch: (batch["x"], batch["t"]))


@entry("from_pretrained: peft LoRA")
def loaded_lora() -> Job:
    base, path = folder("llama"), folder("lora")

    def build() -> nn.Module:
        from peft import PeftModel

        return PeftModel.from_pretrained(load("LlamaForCausalLM", base), path, is_trainable=True)

    return job(build, tokens, token_loss, ids)


@entry("checkpoint_path: timm ViT")
def loaded_timm() -> Job:
    path = folder("vit.pth")

    def build() -> nn.Module:
        import timm

        return timm.create_model("test_vit", num_classes=CLASSES, img_size=32, checkpoint_path=path)

    return job(build, images_of(32), class_loss)


@entry("deepcopy of a loaded Llama")
def copied_llama() -> Job:
    loaded = load("LlamaForCausalLM", folder("llama"))
    return job(lambda: copy.deepcopy(loaded), tokens, token_loss, ids)
