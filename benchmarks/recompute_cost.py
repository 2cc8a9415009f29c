"""What `ac=selective` costs beside no recomputation: time and peak memory, side by side in one process.

    PYTHONPATH=src:benchmarks python benchmarks/recompute_cost.py                 # on a GPU; about six minutes
    PYTHONPATH=src:benchmarks python benchmarks/recompute_cost.py --only eager    # 40 s
    PYTHONPATH=src:benchmarks python benchmarks/recompute_cost.py --tiny          # a dry run on a CPU
    PYTHONPATH=src:benchmarks python benchmarks/recompute_cost.py --only host     # the host's time per block, on a CPU

GPT-2 XL, four sequences of 1,024 tokens, bf16. `by operator` is PyTorch's selective checkpointing, which looks at every
operator; `selective` is ours. Rows of one group are timed in turns. `budget` compiles without checkpoints and lets the
compiler choose what to keep within a share of the memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from plan_gpu import make_up_weights
from torch import nn

from meshwright.assemble import apply
from meshwright.assemble.recompute import recompute_blocks
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World, fake_world
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job

GIB = 1 << 30
Region = Callable[[], AbstractContextManager[Any]]


@contextmanager
def by_operator() -> Iterator[None]:
    """Recompute as PyTorch does."""

    def blocks(modules: list[nn.Module], kind: str, **options: Any) -> None:
        recompute_blocks(modules, kind, by_operator=True)

    with patch.object(apply, "recompute_blocks", blocks):
        yield


@contextmanager
def budget(share: float) -> Iterator[None]:
    """Let the compiler keep this share of what it would keep."""
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=share):
        yield


GROUPS: dict[str, tuple[int, list[tuple[str, str, Region]]]] = {
    "eager": (
        1,
        [
            ("none", "single,bf16", nullcontext),
            ("selective", "single,bf16,ac=selective", nullcontext),
            ("by operator", "single,bf16,ac=selective", by_operator),
            ("full", "single,bf16,ac=full", nullcontext),
        ],
    ),
    "blocks": (
        8,
        [
            ("compile", "ddp,bf16,compile", nullcontext),
            ("compile, selective", "ddp,bf16,compile,ac=selective", nullcontext),
            ("compile, budget 0.5", "ddp,bf16,compile", partial(budget, 0.5)),
        ],
    ),
    "compile": (
        1,
        [
            ("compile", "single,bf16,compile", nullcontext),
            ("compile, selective", "single,bf16,compile,ac=selective", nullcontext),
        ],
    ),
}


@dataclass
class Row:
    """One strategy, its trainer and its measurements."""

    name: str
    trainer: Trainer
    batch: Any
    region: Region
    first: float = 0.0
    held: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)

    def step(self, device: torch.device) -> float:
        with self.region():
            synchronise(device)
            start = time.perf_counter()
            self.trainer.step(self.batch)
            synchronise(device)
            return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def build(name: str, strategy: str, region: Region, model: str, world: World) -> Row:
    job, device = load_job(model), world.device
    job = replace(job, global_batch=4 * world.ranks)
    facts, before = describe(job), allocated(device)
    with region():
        trainer = Trainer(job, facts, Strategy.parse(strategy).resolve(world.ranks), world, seed=0)
    make_up_weights(trainer)
    row = Row(name, trainer, make_batch(job, job.global_batch), region)
    row.first = row.step(device)
    row.held = allocated(device) - before
    return row


def measure(rows: list[Row], device: torch.device, rounds: int) -> None:
    for _ in range(rounds):
        for row in rows:
            row.step(device)  # fills caches after another model ran
            others = allocated(device) - row.held
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            row.seconds.append(row.step(device))
            if device.type == "cuda":
                row.peak = torch.cuda.max_memory_allocated() - others


def show(group: str, rows: list[Row]) -> None:
    first = median(rows[0].seconds)
    for row in rows:
        own = median(row.seconds)
        print(
            f"{group:8} | {row.name:20} | {own * 1e3:8.1f} ms | {own / first:6.3f} | {row.peak / GIB:6.2f} GiB | "
            f"first step {row.first:5.1f} s",
            flush=True,
        )


def early(row: Row) -> str:
    """What is known of a row before it is timed in turns with the others."""
    return f"first step {row.first:.1f} s, then {row.seconds[0] * 1e3:.1f} ms, {row.peak / GIB:.2f} GiB"


class Block(nn.Module):
    """A small block of a transformer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norms[0](x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def host(rounds: int, blocks: int = 24) -> None:
    """Time of forward and backward of blocks so narrow that the host is all of it."""
    torch.set_num_threads(1)
    x, models = torch.randn(1, 8, 32), {}
    for name in ("none", "selective", "by operator"):
        models[name] = nn.Sequential(*(Block() for _ in range(blocks)))
        if name != "none":
            recompute_blocks(list(models[name]), "selective", by_operator=name == "by operator")
    best = dict.fromkeys(models, float("inf"))
    for _ in range(rounds):
        for name, model in models.items():
            start = time.perf_counter()
            model(x).sum().backward()
            best[name] = min(best[name], time.perf_counter() - start)
    for name, seconds in best.items():
        each = seconds / blocks * 1e6
        print(f"host     | {name:20} | {each:8.0f} us a block | {seconds / best['none']:6.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="host,eager,blocks,compile", help="groups, comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    model = "preset:gpt2:seq=16" if options.tiny else "preset:gpt2-xl"
    for group in options.only.split(","):
        if group == "host":
            host(options.rounds * 5)
            continue
        rows: list[Row] = []
        ranks, cases = GROUPS[group]
        world = replace(fake_world(ranks, device), weightless=True)
        for case in cases:
            try:
                rows.append(build(*case, model, world))
                measure(rows[-1:], device, 1)
                print(f"{group:8} | {case[0]:20} | {early(rows[-1])}", flush=True)
            except Exception as error:
                print(f"{group:8} | {case[0]:20} | failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        measure(rows, device, options.rounds)
        show(group, rows)
        rows.clear()
        world.leave()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.compiler.reset()


if __name__ == "__main__":
    main()
