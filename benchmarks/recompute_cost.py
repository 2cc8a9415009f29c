"""What `ac=selective` costs beside no recomputation: time and peak memory, side by side in one process.

    PYTHONPATH=src:benchmarks python benchmarks/recompute_cost.py                 # on a GPU; about six minutes
    PYTHONPATH=src:benchmarks python benchmarks/recompute_cost.py --only eager    # 40 s
    PYTHONPATH=src:benchmarks python benchmarks/recompute_cost.py --tiny          # a dry run on a CPU
    PYTHONPATH=src:benchmarks python benchmarks/recompute_cost.py --only host     # the host's time per block, on a CPU

GPT-2 XL, four sequences of 1,024 tokens, bf16. `by operator` is PyTorch's selective checkpointing, which looks at every
operator; `selective` is ours. Rows of one group are timed in turns, each with the first row of the group. `budget`
compiles without checkpoints and lets the compiler choose what to keep within a share of the memory. Kernels are the sum
of a profiled step: unlike a step's time, it does not depend on the host.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from gpu_steps import make_up_weights
from step_profile import Profile, host_and_wall, profile_step
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
    """Let the compiler keep this share of what it would keep.

    Each share is a backend of its own: compiled code is found again by its backend, and not by this setting.
    """
    import torch._functorch.config as config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=share):
            return compile_fx(graph, inputs)

    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend)):
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
            *(
                (f"compile, budget {share}", "ddp,bf16,compile", partial(budget, share))
                for share in (0.9, 0.5, 0.3, 0.1)
            ),
            ("compile, full", "ddp,bf16,compile,ac=full", nullcontext),
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
    first: float = 0.0
    held: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    beside: float = 0.0
    """Median seconds of the group's first row, in the same turns."""
    profile: Profile | None = None

    def step(self) -> tuple[float, float]:
        """Seconds until a step returned, and until the device was done."""
        host, wall = host_and_wall(lambda: self.trainer.step(self.batch))
        return host / 1e3, wall / 1e3


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def build(name: str, strategy: str, region: Region, model: str, world: World) -> Row:
    job, device = load_job(model), world.device
    job = replace(job, global_batch=4 * world.ranks)
    facts, before = describe(job), allocated(device)
    with region():
        trainer = Trainer(job, facts, Strategy.parse(strategy).resolve(world.ranks), world, seed=0)
    make_up_weights(trainer)
    row = Row(name, trainer, make_batch(job, job.global_batch))
    row.first = row.step()[1]
    row.held = allocated(device) - before
    return row


def measure(rows: list[Row], device: torch.device, rounds: int) -> None:
    for _ in range(rounds):
        for row in rows:
            row.step()  # fills caches after another model ran
            others = allocated(device) - row.held
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            host, wall = row.step()
            row.host.append(host)
            row.seconds.append(wall)
            if device.type == "cuda":
                row.peak = torch.cuda.max_memory_allocated() - others


def show(group: str, row: Row, first: Row) -> None:
    own, others = row.profile, first.profile
    kernels = f"kernels {own.busy:6.1f} ms {own.busy / (others.busy or 1):6.3f} | " if own and others else ""
    print(
        f"{group:8} | {row.name:20} | {median(row.seconds) * 1e3:8.1f} ms | {median(row.seconds) / row.beside:6.3f} | "
        f"host {median(row.host) * 1e3:6.1f} ms | {kernels}{row.peak / GIB:6.2f} GiB | first step {row.first:5.1f} s",
        flush=True,
    )


def run_group(group: str, model: str, device: torch.device, rounds: int) -> None:
    """Measure each row in turns with the first one; no more than two models are on the device."""
    ranks, cases = GROUPS[group]
    world = replace(fake_world(ranks, device), weightless=True)
    first: Row | None = None
    for case in cases:
        try:
            row = build(*case, model, world)
            first = first or row
            pair = [first] if row is first else [first, row]
            first.seconds.clear()
            measure(pair, device, rounds)
            row.beside, row.profile = median(first.seconds), profile_step(row.step)
            show(group, row, first)
        except Exception as error:
            print(f"{group:8} | {case[0]:20} | failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        row, pair = None, []  # type: ignore[assignment]
        gc.collect()
    world.leave()


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
        run_group(group, model, device, options.rounds)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.compiler.reset()


if __name__ == "__main__":
    main()
