"""Host time of a step under `tp=8` beside `single`, for models of transformers with many narrow layers.

    PYTHONPATH=src python benchmarks/tensor_host.py --json docs/data/tensor_host.json

The models are so narrow that the time of a step is the time of its Python code and of launching its operators. One rank
of a fake world runs, so nothing is sent. Each row has forward and backward of one micro-batch: milliseconds
of this process's CPU, operators
(every operator below autograd that computes something, collectives included), microseconds per operator, and that
beside `single`. `tp=8 as before` runs without recorded programs. The hand-written model is a Llama in Megatron's style:
column and row layers with explicit collectives, on plain tensors.

Every case has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

RANKS, LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, SAMPLES = 8, 24, 64, 8, 16, 128, 2
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 128}
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "use_cache": False}
ROUNDS = 30


def language_model(family: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **TOKENS, **sizes})
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return getattr(transformers, family + suffix)(config)  # type: ignore[no-any-return]


def build_llama() -> nn.Module:
    return language_model("Llama", num_key_value_heads=HEADS)


def build_qwen3() -> nn.Module:
    return language_model("Qwen3", num_key_value_heads=HEADS, head_dim=WIDTH // HEADS)


def build_gpt2() -> nn.Module:
    return language_model(
        "GPT2",
        n_embd=WIDTH,
        n_head=HEADS,
        n_layer=LAYERS,
        n_positions=LENGTH,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )


def build_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=8))


def build_megatron() -> nn.Module:
    return Megatron()


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "Llama": build_llama,
    "GPT-2": build_gpt2,
    "Qwen3": build_qwen3,
    "ViT": build_vit,
}


def sample(n: int) -> dict[str, Tensor]:
    text = torch.arange(n * (LENGTH + 1)).view(n, -1) * 7 % VOCABULARY
    return {"x": text[:, :-1], "y": text[:, 1:], "images": torch.ones(n, 3, 16, 16), "labels": torch.arange(n) % 8}


def token_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def image_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output.logits, batch["labels"], reduction="sum"), len(batch["labels"])


class ColumnInput(torch.autograd.Function):
    """The sequence gathered; its gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather_sequence(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return scatter_sequence(gradients[0])


class RowOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scatter_sequence(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gather_sequence(gradients[0])


class SharedWeight(torch.autograd.Function):
    """A norm's weight: ranks compute shares of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def gather_sequence(x: Tensor) -> Tensor:
    out = x.new_empty(RANKS, *x.shape)
    dist.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1))
    return torch.cat(out.unbind(0), 1)


def scatter_sequence(x: Tensor) -> Tensor:
    parts = torch.stack(x.chunk(RANKS, 1))
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(out.view(-1), parts.view(-1))
    return out


class MegatronBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        own, inner = WIDTH // RANKS, 128 // RANKS
        self.first_norm, self.second_norm = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.query, self.key, self.value = (nn.Linear(WIDTH, own, bias=False) for _ in range(3))
        self.out = nn.Linear(own, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, inner, bias=False), nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = ColumnInput.apply(norm(x, self.first_norm))
        shape = (*y.shape[:2], -1, WIDTH // HEADS)
        q, k, v = (layer(y).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        q, k = q * cos + rotate(q) * sin, k * cos + rotate(k) * sin
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(*y.shape[:2], -1)
        x = x + RowOutput.apply(self.out(mixed))
        y = ColumnInput.apply(norm(x, self.second_norm))
        return x + RowOutput.apply(self.down(F.silu(self.gate(y)) * self.up(y)))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers computes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return SharedWeight.apply(weight) * wide.to(x.dtype)


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Megatron(nn.Module):
    """The blocks of a divided Llama between a whole embedding and a whole head."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(MegatronBlock() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        cos = sin = torch.ones(1, 1, x.shape[1], WIDTH // HEADS)
        x = self.token(x).chunk(RANKS, 1)[0]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(ColumnInput.apply(x))


class Operators(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented
        if not func.is_view and func.namespace != "prim" and "_unsafe_view" not in func.name():
            self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))


def make_pass(model: str, strategy: str) -> Callable[[], Any]:
    """A function that runs forward and backward of one micro-batch."""
    from torch.optim import SGD

    from meshwright import Job
    from meshwright.assemble.step import Trainer
    from meshwright.assemble.world import alone, fake_world
    from meshwright.describe.model import describe
    from meshwright.describe.observe import make_batch
    from meshwright.facts.strategy import Strategy

    if model == "hand-written":
        fake_world(RANKS, torch.device("cpu"))
        module, batch = build_megatron(), sample(SAMPLES)

        def run() -> None:
            loss, _ = token_loss(module(batch["x"]), batch)
            loss.backward()
            for parameter in module.parameters():
                parameter.grad = None

        return run
    words, _, how = strategy.partition(" ")
    vision = model == "ViT"
    job = Job(
        model=BUILDERS[model],
        inputs=lambda batch: {"pixel_values": batch["images"]} if vision else {"input_ids": batch["x"]},
        loss=image_loss if vision else token_loss,
        optimizer=lambda params: SGD(params, lr=1e-3),
        sample=sample,
        global_batch=SAMPLES,
    )
    facts = describe(job)
    ranks = RANKS if "tp" in words else 1
    world = fake_world(ranks, torch.device("cpu")) if ranks > 1 else alone(torch.device("cpu"))
    trainer = Trainer(job, facts, Strategy.parse(words).resolve(ranks), world, seed=0)
    if how:
        from meshwright.strategies.tensor.replay import recording

        recording(False)
    data = make_batch(job, SAMPLES)

    def step() -> None:
        trainer.forward_backward(data)
        trainer._pending = None
        for parameter in trainer._own:
            parameter.grad = None

    return step


def measure(task: tuple[str, str]) -> dict[str, Any]:
    model, strategy = task
    torch.set_num_threads(1)
    run = make_pass(model, strategy)
    for _ in range(4):
        run()
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    with Operators() as seen:
        run()
    found, operators = min(seconds), seen.count.total()  # others use this machine too
    return {
        "model": model,
        "strategy": strategy,
        "ms": round(found * 1e3, 2),
        "operators": operators,
        "us_per_operator": round(found / operators * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*BUILDERS, "hand-written"])
    parser.add_argument("--strategies", nargs="+", default=["single", "tp=8 as before", "tp=8"])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    tail = "" if asked.precision == "fp32" else f",{asked.precision}"
    strategies = [
        f"{words}{tail}{rest}"
        for words, _, rest in (s.partition(" ") for s in asked.strategies)
        for rest in [f" {rest}" if rest else ""]
    ]
    tasks = [(model, strategy) for model in asked.models if model != "hand-written" for strategy in strategies]
    tasks += [("hand-written", "tp=8")] if "hand-written" in asked.models else []
    rows = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for row in pool.map(measure, tasks):
            if row["strategy"].startswith("single"):
                single = row
            if row["model"] != "hand-written":
                row["beside_single"] = round(row["us_per_operator"] / single["us_per_operator"], 2)
                row["time_beside_single"] = round(row["ms"] / single["ms"], 2)
            rows.append(row)
            print(row, flush=True)
    if asked.json:
        where = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "layers": LAYERS,
            "precision": asked.precision,
        }
        asked.json.write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
