"""Small models of many families, to be divided over ranks, and their jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minimal
from meshwright import Job
from meshwright.describe.blocks import find_blocks
from meshwright.describe.tensor_plan import find_tensor_plan
from meshwright.facts.tensor_plan import TensorPlan
from meshwright.recording.blueprint import record

VOCABULARY, LENGTH, WIDTH, HEADS = 64, 8, 32, 4
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "use_cache": False}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def language_model(family: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A causal language model of a family of transformers, from its config."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(**{**SIZES, **TOKENS, **sizes})
        suffix = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration", "Bert": "ForMaskedLM"}
        return getattr(transformers, family + suffix.get(family, "ForCausalLM"))(config)  # type: ignore[no-any-return]

    return build


def vision_transformer() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**{**SIZES, "image_size": 8, "patch_size": 4, "intermediate_size": 48, "num_labels": 6})
    return ViTForImageClassification(config)


def example_gpt() -> nn.Module:
    return ExampleGPT()


class ExampleAttention(nn.Module):
    """As in examples/gpt.py."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class ExampleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = ExampleAttention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ExampleGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(ExampleBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class OddVocabulary(ExampleGPT):
    """Two ranks cannot divide its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY + 1)


class Awkward(nn.Module):
    """Does to divided activations what their author may do to whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.gain = nn.Parameter(torch.ones(48))
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        y = self.up(x)
        y += self.gain
        y = self.act(y) * y.std(-1, keepdim=True)  # a function without a rule
        y[..., 1:5] = y[..., 0:4].cumsum(-1)
        y = torch.sort(y, dim=-1).values
        y.mul_(0.5).clamp_(min=0.01)
        y = y.view(y.shape[0], -1, 6, 8).flip(2).reshape(*x.shape[:-1], -1)
        z = self.down(y)
        z += x
        return self.head(z)


class FusedVision(nn.Module):
    """Query, key and value in one, cut as (3, heads, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 96), nn.Linear(48, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.head(x + self.down(F.silu(gate) * up))


class NarrowedVision(FusedVision):
    """The same pieces, taken one by one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        fused, shape = self.qkv(x), (x.shape[0], LENGTH, HEADS, -1)
        q, k = fused[:, :, :WIDTH].view(shape), fused.narrow(-1, WIDTH, WIDTH).view(shape)
        v = fused[..., -WIDTH:].view(shape)
        heads = (each.transpose(1, 2) for each in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape))
        wide = self.gate_up(x)
        return self.head(x + self.down(F.silu(wide[..., :48]) * wide[..., 48:]))


class Sums(torch.autograd.Function):
    """Over all of the width, of which a rank has a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.flip(-1).cumsum(-1).flip(-1)


class Product(torch.autograd.Function):
    """A linear layer whose backward is its author's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class OwnProduct(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight)


class OwnBackward(nn.Module):
    """Recomputes in the backward pass, and has autograd functions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = OwnProduct(WIDTH, 48, bias=False), nn.Linear(48, WIDTH)
        self.again = self.up  # one module under two names
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        y = checkpoint(lambda z: Sums.apply(F.gelu(self.up(z))), x, use_reentrant=False)
        (slope,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
        return self.head(x + self.down(y + slope))


LLAMA = {"num_key_value_heads": 2, "intermediate_size": 48}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "example": example_gpt,
    "odd vocabulary": OddVocabulary,
    "awkward": Awkward,
    "fused": FusedVision,
    "narrowed": NarrowedVision,
    "own backward": OwnBackward,
    "llama": language_model("Llama", **LLAMA),
    "llama-cache": language_model("Llama", **LLAMA, use_cache=True),
    "llama-1kv": language_model("Llama", **{**LLAMA, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama-eager": language_model("Llama", **LLAMA, attn_implementation="eager"),
    "mistral": language_model("Mistral", **LLAMA, head_dim=8),
    "qwen2": language_model("Qwen2", **LLAMA),
    "qwen3": language_model("Qwen3", **LLAMA, head_dim=8),
    "gemma": language_model("Gemma", **LLAMA, head_dim=8),
    "gemma2": language_model("Gemma2", **LLAMA, head_dim=8),
    "olmo2": language_model("Olmo2", **{**LLAMA, "num_key_value_heads": 4}),
    "phi3": language_model("Phi3", **LLAMA),
    "phi3-even": language_model("Phi3", **{**LLAMA, "num_key_value_heads": 4}),
    "gpt2": language_model(
        "GPT2", n_embd=WIDTH, n_head=HEADS, n_layer=2, n_positions=LENGTH, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    ),
    "gpt2-eager": language_model(
        "GPT2",
        n_embd=WIDTH,
        n_head=HEADS,
        n_layer=2,
        n_positions=LENGTH,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
        attn_implementation="eager",
    ),
    "bert": language_model("Bert", intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "vit": vision_transformer,
    "gpt-neox": language_model("GPTNeoX", intermediate_size=48, **NO_DROPOUT),
    "opt": language_model("OPT", ffn_dim=48, word_embed_proj_dim=WIDTH, dropout=0.0, max_position_embeddings=LENGTH),
    "phi": language_model("Phi", intermediate_size=48),
    "falcon": language_model("Falcon", **NO_DROPOUT),
    "falcon-new": language_model("Falcon", new_decoder_architecture=True, num_kv_heads=2, **NO_DROPOUT),
    "bloom": language_model("Bloom", n_head=HEADS, n_layer=2, **NO_DROPOUT),
    "t5": language_model(
        "T5", d_model=WIDTH, d_kv=8, d_ff=48, num_heads=HEADS, num_layers=2, dropout_rate=0.0, decoder_start_token_id=0
    ),
    "mixtral": language_model(
        "Mixtral", **LLAMA, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager"
    ),
    "mamba": language_model("Mamba", state_size=4, intermediate_size=64),
}


PLAIN = ("example", "odd vocabulary", "awkward", "fused", "narrowed", "own backward")
"""Models that are written here."""
FAMILIES = [name for name in MODELS if name not in PLAIN]


def sample(n: int, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (n, LENGTH + 1), generator=generator)
    images = torch.randn(n, 3, 8, 8, generator=generator)
    return {"x": text[:, :-1], "y": text[:, 1:], "images": images, "labels": torch.arange(n) % 6}


def inputs(name: str) -> Callable[[Any], dict[str, Any]]:
    if name == "vit":
        return lambda batch: {"pixel_values": batch["images"]}
    if name in PLAIN:
        return lambda batch: {"x": batch["x"]}
    if name == "t5":
        return lambda batch: {"input_ids": batch["x"], "decoder_input_ids": batch["y"]}
    return lambda batch: {"input_ids": batch["x"]}


def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(batch["labels"])
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def job_of(name: str, **parts: Any) -> Job:
    made: dict[str, Any] = {"model": MODELS[name], "inputs": inputs(name), "loss": loss, "sample": sample}
    return minimal.make_job(**{**made, **parts})


def plan_of(job: Job) -> tuple[TensorPlan, tuple[str, ...]]:
    blueprint = record(job.model, seed=0)
    blocks = find_blocks(blueprint.model)
    return find_tensor_plan(job, blueprint, blocks), blocks
