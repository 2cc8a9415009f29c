"""Small models of many families, and what tests run on real ranks to see that dividing them changes no number."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import minimal
from meshwright import Job
from meshwright.assemble.precision import cast, cast_borders, cast_parameters
from meshwright.assemble.recompute import recompute_blocks
from meshwright.assemble.world import World
from meshwright.describe.blocks import find_blocks
from meshwright.describe.tensor_plan import find_tensor_plan
from meshwright.errors import Refused
from meshwright.facts.tensor_plan import TensorPlan
from meshwright.recording.blueprint import record
from meshwright.strategies.cuts import Cuts
from meshwright.strategies.engine import whole
from meshwright.strategies.tensor.layout import divided, local, part
from meshwright.strategies.tensor.matrix import SEQUENCE
from meshwright.strategies.tensor.memory import as_parameter
from meshwright.strategies.tensor.mode import mode_of, tensor_region
from meshwright.strategies.tensor.replay import program_state
from meshwright.strategies.tensor.split import gathered_functions, split_tensors, to_plain
from shared_facts import found_once

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


def shared_plan(world: World, name: str) -> tuple[TensorPlan, tuple[str, ...]]:
    """A model's plan and blocks, found once."""
    found: tuple[TensorPlan, tuple[str, ...]] = found_once(world, ("plan", name), lambda: plan_of(job_of(name)))
    return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A divided model beside the whole one."""

    refused: str | None = None
    loss: float = 0.0
    whole_loss: float = 0.0
    worst: str = ""
    """The parameter whose gradient differs most."""
    difference: float = 0.0
    """By how much of its largest element."""
    gathered: dict[str, int] = field(default_factory=dict)
    local: float = 1.0
    """The share of all parameters that a rank holds."""
    replayed: int = 0
    """Blocks that ran as recorded programs."""
    unrecorded: list[str] = field(default_factory=list)
    """Why other blocks could not be recorded."""

    @property
    def equal(self) -> bool:
        return abs(self.loss - self.whole_loss) <= 1e-6 * abs(self.whole_loss) and self.difference <= 1e-5


def compare(world: World, name: str, options: Collection[str] = ()) -> Comparison:
    """Forward, loss and backward, whole and divided over all ranks, from the same weights.

    Options: sequence, recompute, bf16; ddp or fsdp on a data axis beside the tensor axis.
    """
    job = job_of(name)
    plan, blocks = shared_plan(world, name)
    data = 2 if {"ddp", "fsdp"} & set(options) else 1
    if reason := plan.refuse(world.ranks // data):
        return Comparison(refused=reason)
    axes = init_device_mesh("cpu", (data, world.ranks // data), mesh_dim_names=("data", "tensor"))
    mesh = axes["tensor"]
    reference = whole_model(job)
    model, cuts = divided_model(
        job, replace(plan, sequence=plan.sequence and "sequence" in options), mesh, blocks, reference
    )
    called = _under(options, model, blocks, axes["data"])
    if "bf16" in options:
        _lower(reference, blocks)
    batch = sample(2, seed=7)
    expected = _loss(job, reference, batch)
    expected.backward()
    mode_of(mesh).gathered.clear()
    # The first pass records the blocks' programs, the second one runs them.
    worst, difference = "", 0.0
    for _ in range(2):
        before = gathered_functions(mesh)
        model.zero_grad()
        with tensor_region(mesh):
            found = to_plain(_loss(job, called, batch), mesh)
            found.backward()
        worst, difference = max((worst, difference), _worst(model, reference, cuts), key=lambda pair: pair[1])
    again = {name: count - before.get(name, 0) for name, count in gathered_functions(mesh).items()}
    assert again == before or not before, (before, again)
    programs = [program_state(model.get_submodule(name)) for name in blocks]
    return Comparison(
        replayed=sum(any(bound.calls for bound in state.programs) for state in programs),
        unrecorded=sorted({state.reason for state in programs if state.reason}),
        loss=found.item(),
        whole_loss=expected.item(),
        worst=worst,
        difference=difference,
        gathered=before,
        local=sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in reference.parameters()),
    )


def _under(options: Collection[str], model: nn.Module, blocks: tuple[str, ...], data: DeviceMesh) -> nn.Module:
    """The model under what a strategy lays over it, in the order in which `build` does."""
    modules = [model.get_submodule(name) for name in blocks]
    if "bf16" in options:
        _lower(model, blocks)
    if "recompute" in options:
        recompute_blocks(modules, "full")
    if "ddp" in options:
        return DistributedDataParallel(model, process_group=data.get_group())
    if "fsdp" in options:
        for module in (*modules, model):
            fully_shard(module, mesh=data)
    return model


def _lower(model: nn.Module, blocks: tuple[str, ...]) -> None:
    cast_parameters(model, torch.bfloat16)
    cast_borders(model, [model.get_submodule(name) for name in blocks], torch.bfloat16)


def _loss(job: Job, model: nn.Module, batch: Any) -> Tensor:
    total, _ = job.loss(cast(model(**job.inputs(batch)), torch.float32), batch)  # type: ignore[arg-type]
    return total


def whole_model(job: Job) -> nn.Module:
    torch.manual_seed(0)
    return job.model()


def divided_model(
    job: Job, plan: TensorPlan, mesh: DeviceMesh, blocks: tuple[str, ...], reference: nn.Module
) -> tuple[nn.Module, Cuts]:
    model = record(job.model, seed=0).model
    cuts = split_tensors(model, plan, mesh, blocks)
    fill(model, cuts, reference)
    return model, cuts


@torch.no_grad()
def fill(model: nn.Module, cuts: Cuts, reference: nn.Module) -> None:
    """Give a divided model on the meta device the weights of a whole one."""
    values = dict(reference.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = f"{name}.{attribute}" if name else attribute
            if id(parameter) not in made:
                value = cuts[full].take(values[full]) if full in cuts else values[full].clone()
                assert value.shape == parameter.shape
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[attribute] = made[id(parameter)]
        other = reference.get_submodule(name)
        module._buffers = {key: value if value is None else value.clone() for key, value in other._buffers.items()}
        for attribute, value in vars(other).items():
            if isinstance(value, Tensor):
                setattr(module, attribute, value)


def _worst(model: nn.Module, reference: nn.Module, cuts: Cuts) -> tuple[str, float]:
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    # A gradient that is zero but for rounding, as that of a key's bias, is measured by the others.
    floor = 1e-2 * max(float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None)
    found = [("", 0.0)]
    for name, parameter in model.named_parameters():
        expected = wanted[name]
        if expected is None or parameter.grad is None:
            found.append((name, 0.0 if (expected is None) == (parameter.grad is None) else float("inf")))
            continue
        gradient = whole(parameter.grad)
        gradient = cuts[name].join(gradient) if name in cuts else gradient
        found.append((name, float((gradient - expected).abs().max()) / max(float(expected.abs().max()), floor)))
    return max(found, key=lambda pair: pair[1])


X, Y, ROW = (4, 8, 12), (4, 8, 12), (12,)
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "add": lambda x, y, row: x + y,
    "add a row": lambda x, y, row: x + row,
    "add a column": lambda x, y, row: x * y[:, :, :1] - y[:1],
    "from the right": lambda x, y, row: 1.0 / (2.0 + x * x) + torch.maximum(x, row),
    "activations": lambda x, y, row: F.gelu(x) * F.silu(y) + F.relu(x, inplace=False).tanh() + F.softplus(y),
    "where": lambda x, y, row: torch.where(x > 0, x, row).masked_fill(y > 1, 0.5).clamp(max=1.0),
    "power": lambda x, y, row: (x.pow(2) + 1).rsqrt() * x.float().sigmoid().double().to(x.dtype),
    "heads": lambda x, y, row: x.view(4, 8, 4, 3).transpose(1, 2) * 2,
    "heads and back": lambda x, y, row: x.unflatten(-1, (4, 3)).permute(0, 2, 1, 3).transpose(1, 2).flatten(2) * row,
    "flatten": lambda x, y, row: x.flatten(0, 1) * 2 + x.reshape(-1, 12),
    "flatten all": lambda x, y, row: x.reshape(-1).sin(),
    "unsqueeze": lambda x, y, row: (x[:, None].expand(-1, 2, -1, -1).reshape(8, 8, 12) * row).unsqueeze(-1).squeeze(-1),
    "expand": lambda x, y, row: x.unsqueeze(1).expand(4, 3, 8, 12).cos(),
    "repeat": lambda x, y, row: x.repeat(1, 2, 1).repeat_interleave(2, dim=-1),
    "split": lambda x, y, row: torch.cat([part * 2 for part in x.split(4, dim=1)], dim=1),
    "chunk": lambda x, y, row: [part.exp() for part in x.chunk(2, dim=-1)],
    "rotate": lambda x, y, row: torch.cat([-x[..., 6:], x[..., :6]], dim=-1) * y,
    "cut sizes": lambda x, y, row: [part + 1 for part in x.split([3, 9], dim=2)],
    "unbind": lambda x, y, row: [part * part for part in x.unbind(1)],
    "index": lambda x, y, row: x[:, 0] * 2,
    "last": lambda x, y, row: x[..., -1, None, :].sum(),
    "slices": lambda x, y, row: x[1:3, :, 2:10:2].exp() + x[1:3, 0:8, 0:8:2],
    "select": lambda x, y, row: x.select(1, 3) + x.narrow(1, 2, 1).squeeze(1),
    "gather": lambda x, y, row: x[torch.tensor([1, 3, 1])] * 3,
    "stack": lambda x, y, row: torch.stack([x, y, x], dim=1) * 2,
    "softmax": lambda x, y, row: F.softmax(x, dim=-1) + torch.log_softmax(y, 1),
    "means": lambda x, y, row: (x - x.mean(-1, keepdim=True)) * x.mean(1, keepdim=True) + x.sum(),
    "sums": lambda x, y, row: x.sum((0, 2)) + x.mean(dim=1).sum(),
    "variance": lambda x, y, row: x.var(-1) + x.norm(dim=-1),
    "layer norm": lambda x, y, row: F.layer_norm(x, (12,), row, row * 2) + F.rms_norm(y, (12,), row),
    "norm of two": lambda x, y, row: F.layer_norm(x, (8, 12)),
    "linear": lambda x, y, row: F.linear(x, y[0], y[0, :, 0]),
    "matmul": lambda x, y, row: x @ y.transpose(1, 2),
    "matmul rows": lambda x, y, row: x @ y[0].T,
    "matmul heads": lambda x, y, row: x.view(4, 8, 4, 3).transpose(1, 2) @ y.view(4, 8, 4, 3).permute(0, 2, 3, 1),
    "einsum": lambda x, y, row: torch.einsum("bsw,btw->bst", x, y),
    "attention": lambda x, y, row: F.scaled_dot_product_attention(x[:, :, None], y[:, :, None], x[:, :, None]),
    "cumulative": lambda x, y, row: x.cumsum(1).cumsum(2),
    "new": lambda x, y, row: x.new_ones(3) * x[0, 0, 0] + torch.zeros_like(x).sum() + torch.ones_like(x).mean(),
    "values": lambda x, y, row: x * float(y.detach().sum()) + (1.0 if bool((x > 100).any()) else 2.0),
    "in place": lambda x, y, row: (x * 1).add_(y).mul_(row).relu_() + F.relu(y * 2, inplace=True),
    "operators in place": lambda x, y, row: changed(x * 2, y, row),
    "items in place": lambda x, y, row: with_items(x * 2, y),
    "a view in place": lambda x, y, row: (x * 2).view(4, 8, 4, 3).transpose(1, 2).mul_(3.0),
    "a whole one in place": lambda x, y, row: torch.zeros(4, 8, 12).add_(x),
    "loss": lambda x, y, row: F.mse_loss(x, y, reduction="sum"),
    "classes": lambda x, y, row: F.cross_entropy(x.flatten(0, 1), torch.arange(32) % 12),
    "classes, some ignored": lambda x, y, row: F.cross_entropy(
        x.flatten(0, 1), torch.arange(32) % 13 - 1, ignore_index=-1, reduction="sum"
    ),
    "classes each": lambda x, y, row: F.cross_entropy(
        x.transpose(1, 2), (torch.arange(32) % 12).view(4, 8), reduction="none"
    ),
    "classes, smoothed": lambda x, y, row: F.cross_entropy(x[0], torch.arange(8), label_smoothing=0.1),
    "classes, weighted": lambda x, y, row: F.cross_entropy(x[0], torch.arange(8), weight=row.detach().abs()),
    "probabilities": lambda x, y, row: F.cross_entropy(x[0], y[0].softmax(-1)),
    "log likelihood": lambda x, y, row: F.nll_loss(F.log_softmax(x[0], dim=-1), torch.arange(8)),
}


def changed(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
    x += y
    x *= row
    x -= 1
    return x


def with_items(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1:3] = y[:, 0:2]
    x[..., 0] = 0.0
    return x


def function_differences(world: World) -> dict[str, float]:
    """How far each function on parts is from the same on whole tensors, for every way to divide its arguments."""
    mesh = init_device_mesh("cpu", (world.ranks,))
    found = {}
    for name, function in FUNCTIONS.items():
        for dims in [(0, None), (1, None), (2, None), (None, 2), (2, 2), (1, 2), (0, 1)]:
            found[f"{name} {dims}"] = _difference(function, dims, mesh)
    return found


def _difference(function: Callable[..., Any], dims: tuple[int | None, ...], mesh: DeviceMesh) -> float:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=generator, requires_grad=True) for shape in (X, Y, ROW)]
    expected = tree_leaves(function(*tensors))
    wanted = _gradients(expected, tensors)
    with tensor_region(mesh):
        given = [_divide(x, dim, mesh) for x, dim in zip(tensors, (*dims, None), strict=True)]
        results = to_plain(tree_leaves(function(*given)), mesh)
        found = _gradients(results, tensors)
    return max(_distance(a, b) for a, b in zip((*expected, *wanted), (*results, *found), strict=True))


def _divide(x: Tensor, dim: int | None, mesh: DeviceMesh) -> Tensor:
    return x if dim is None else divided(part(x, dim, mesh), dim, mesh)


def _gradients(results: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    total = torch.stack(
        [(result * torch.linspace(1, 2, result.numel()).view(result.shape)).sum() for result in results]
    )
    found = torch.autograd.grad(total.sum(), tensors, allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-3))


def refusal(world: World, change: Callable[..., None], *args: Any) -> str:
    """What every rank is told; raised, it would end the ranks."""
    with pytest.raises(Refused) as caught:
        change(world, *args)
    return str(caught.value)


def change_a_view(world: World, dim: int, then: str) -> None:
    """Change a view of a divided tensor, then read the tensor; or change the tensor, then read the view."""
    mesh = init_device_mesh("cpu", (world.ranks,))
    with tensor_region(mesh):
        x = _divide(torch.ones(4, 8, 12), dim, mesh) * 2
        view = x.view(4, 8, 4, 3)[:, 0]
        if then == "read the tensor":
            view.mul_(3.0)
            x.sum()
        else:
            x += 1
            view.sum()


def change_a_parameter(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.ranks,))
    layer = nn.Linear(4, 4)
    with tensor_region(mesh):
        as_parameter(divided(layer.weight, 0, mesh)).data.clamp_(max=0.0)


def dropped(world: World) -> tuple[Tensor, Tensor, float]:
    """This rank's part after dropout, the same computed again from the same state, and a number drawn afterwards."""
    mesh = init_device_mesh("cpu", (world.ranks,))

    def draw() -> Tensor:
        torch.manual_seed(5)
        with tensor_region(mesh):
            return local(F.dropout(_divide(torch.ones(64, 8), 1, mesh), 0.5))  # type: ignore[arg-type]

    first, second = draw(), draw()
    return first, second, float(torch.rand(()))


def collectives(world: World, name: str) -> int:
    """How many collectives one forward and backward of a model take."""
    job = job_of(name)
    plan, blocks = shared_plan(world, name)
    mesh = init_device_mesh("cpu", (world.ranks,))
    model, _ = divided_model(job, replace(plan, sequence=False), mesh, blocks, whole_model(job))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, tensor_region(mesh):
        to_plain(_loss(job, model, sample(2)), mesh).backward()
    return sum(event.name.startswith("gloo:") for event in profile.events())


def divides_a_stage(world: World) -> list[str]:
    """Divide a model of which only one block is there, as a pipeline's stage has it."""
    job = job_of("example")
    plan, blocks = shared_plan(world, "example")
    model = record(job.model, seed=0).model
    model.blocks[0] = nn.Identity()
    model.blocks[1].attention = nn.Identity()
    model.blocks[1].up._parameters["weight"] = None
    model.blocks[1].down._parameters["bias"] = None
    for name in ("token", "head"):
        del model._modules[name]
    return sorted(split_tensors(model, plan, init_device_mesh("cpu", (world.ranks,)), blocks))


def wire(world: World) -> bool:
    """A whole tensor's part along the sequence, and the divided tensor that is made from the part."""
    mesh = init_device_mesh("cpu", (world.ranks,))
    x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    sent = part(x, SEQUENCE, mesh)
    received = divided(sent.detach().requires_grad_(), SEQUENCE, mesh)
    with tensor_region(mesh):
        again = part(received * 1, SEQUENCE, mesh)
    return sent.shape == (2, 8 // world.ranks, 4) and again.equal(sent) and to_plain(received, mesh).equal(x)


def cut_names(world: World, name: str) -> list[str]:
    """Every name under which a parameter of a model is cut."""
    plan, blocks = shared_plan(world, name)
    mesh = init_device_mesh("cpu", (world.ranks,), mesh_dim_names=("tensor",))
    return sorted(split_tensors(record(MODELS[name], seed=0).model, plan, mesh, blocks))
