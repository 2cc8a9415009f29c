"""Time and memory of `loss=pieced` beside the whole loss, on one GPU.

    PYTHONPATH=src:benchmarks python benchmarks/pieced_loss_gpu.py                 # about five minutes
    PYTHONPATH=src:benchmarks python benchmarks/pieced_loss_gpu.py --only head     # the output layer alone; a minute
    PYTHONPATH=src:benchmarks python benchmarks/pieced_loss_gpu.py --tiny          # the same paths, without a GPU

1. `head`: an output layer and its loss alone, forward and backward; `--sizes` tries pieces of several sizes.
2. Whole steps of one rank of a fake world, both trainers in one process, their steps in turn.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_steps import make_up_weights
from step_profile import differences, profile_step
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts import pieces
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.pieced_loss.head import HeadCalls, Output
from meshwright.pieced_loss.losses import compiled_gradient

GIB = 1 << 30
HEADS = [("llama3-8b 1x8192", 8192, 4096, 128256), ("gpt2 16x1024", 16384, 768, 50304)]
CASES = [
    ("preset:llama3-8b:seq=8192,batch=64", "fsdp,bf16", 64),
    ("preset:gpt2:seq=1024,batch=16", "single,bf16", 1),
    ("preset:llama3-8b:seq=8192,batch=64", "fsdp,bf16,compile", 64),
    ("preset:llama3.2-1b:seq=2048,batch=8", "single,bf16", 1),
    ("preset:gpt2:seq=1024,batch=16", "single,bf16,compile", 1),
    ("preset:llama3.2-1b:seq=2048,batch=8", "single,bf16,compile", 1),
]
TINY_HEADS = [("tiny", 64, 32, 200)]
TINY_CASES = [("examples/gpt.py", "single,bf16", 1), ("examples/gpt.py", "fsdp,bf16", 8)]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return (time.perf_counter() - start) * 1e3


def peak_of(run: Callable[[], Any], device: torch.device) -> float:
    """GiB that a run allocates on top of what was there."""
    if device.type != "cuda":
        run()
        return 0.0
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def measure_head(
    name: str,
    tokens: int,
    width: int,
    classes: int,
    device: torch.device,
    rounds: int,
    sizes: list[int],
    *,
    profiled: bool,
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(classes, width, device=device, dtype=torch.bfloat16) * 0.02).requires_grad_()
    target = torch.randint(0, classes, (tokens,), device=device)

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target, reduction="sum")

    compiled_loss = torch.compile(loss_of)

    def step(loss: Callable[[Tensor], Tensor], mode: Any = None) -> tuple[Tensor, ...]:
        if mode is None:
            total = loss(F.linear(hidden, weight))
        else:
            with mode:
                logits = F.linear(hidden, weight)
            total = loss(logits)
        return (total.detach(), *torch.autograd.grad(total * 1e-3, (hidden, weight)))

    def pieced(gradient: Any, largest: int) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            pieces.LARGEST = largest
            mode = HeadCalls(
                Output(shape=(classes, width), gradient=gradient), lambda f, args, kwargs: f(*args, **kwargs)
            )
            return step(loss_of, mode)

        return run

    fused = compiled_gradient()
    runs = {"whole": lambda: step(loss_of), "whole compiled": lambda: step(compiled_loss)}
    runs |= {f"pieced {size >> 20}Mi": pieced(None, size) for size in sizes}
    runs |= {f"pieced compiled {size >> 20}Mi": pieced(fused, size) for size in sizes}
    exact = step(loss_of)
    for label, run in runs.items():
        try:
            found = run()
            apart = [
                float((a.double() - b.double()).norm() / a.double().norm()) for a, b in zip(exact, found, strict=True)
            ]
            del found
            peak = peak_of(run, device)
            ms = median(milliseconds(run, device) for _ in range(rounds))
            error = " ".join(f"{each:.1e}" for each in apart)
            print(
                f"head {name:18s} {label:22s} {ms:8.2f} ms  {peak:6.2f} GiB  off by (loss, hidden, weight) {error}",
                flush=True,
            )
            if profiled:
                for kernel, (count, taken) in sorted(profile_step(run).kernels.items(), key=lambda item: -item[1][1]):
                    print(f"    {taken:8.2f} ms {count:5d} {kernel[:120]}", flush=True)
        except Exception:
            traceback.print_exc()
            print(f"head {name:18s} {label:22s} FAILED", flush=True)


def measure_case(job_text: str, text: str, ranks: int, device: torch.device, rounds: int, *, profiled: bool) -> None:
    job = load_job(job_text)
    facts, batch = describe(job), make_batch(job, job.global_batch)
    world = replace(fake_world(ranks, device), weightless=True)
    trainers = {}
    for loss in ("whole", "pieced"):
        strategy = Strategy.parse(f"{text},loss={loss}").resolve(ranks)
        torch.manual_seed(0)
        trainers[loss] = Trainer(job, facts, strategy, world, seed=0)
        make_up_weights(trainers[loss])
    batch = tree_map(lambda leaf: leaf.to(device) if torch.is_tensor(leaf) else leaf, batch)
    first = {loss: trainer.step(batch).loss for loss, trainer in trainers.items()}
    peaks = {loss: peak_of(lambda trainer=trainer: trainer.step(batch), device) for loss, trainer in trainers.items()}
    times: dict[str, list[float]] = {loss: [] for loss in trainers}
    for _ in range(rounds):
        for loss, trainer in trainers.items():
            times[loss].append(milliseconds(lambda trainer=trainer: trainer.step(batch), device))
    ms = {loss: median(found) for loss, found in times.items()}
    print(
        f"{job_text} {text}: whole {ms['whole']:.1f} ms {peaks['whole']:.2f} GiB, pieced {ms['pieced']:.1f} ms "
        f"{peaks['pieced']:.2f} GiB; {peaks['whole'] - peaks['pieced']:.2f} GiB less, "
        f"time x{ms['pieced'] / ms['whole']:.4f} (fastest x{min(times['pieced']) / min(times['whole']):.4f}), "
        f"first losses {first['whole']:.6f} {first['pieced']:.6f}",
        flush=True,
    )
    if profiled:
        show_profiles(trainers, batch)
    del trainers
    gc.collect()
    dist.destroy_process_group()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def show_profiles(trainers: dict[str, Trainer], batch: Any) -> None:
    """Where the two steps spend their time, and the kernels that differ most."""
    found = {loss: profile_step(lambda trainer=trainer: trainer.step(batch)) for loss, trainer in trainers.items()}
    for loss, one in found.items():
        print(
            f"    {loss:8s} wall {one.wall:.1f} ms, host {one.host:.1f} ms, kernels {one.busy:.1f} ms in "
            f"{one.launches} launches: {one.by_kind()}"
        )
    print("    " + "\n    ".join(differences(found["whole"], found["pieced"])), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run rows that contain this text; `head` is the layer alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[256], help="Mi elements of a piece's logits, for `head`"
    )
    parser.add_argument("--profile", action="store_true", help="print kernels by kind, and those that differ")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    asked = parser.parse_args()
    device = torch.device("cpu") if asked.tiny else torch.device("cuda", 0)
    for head in TINY_HEADS if asked.tiny else HEADS:
        if asked.only in f"head {head[0]}":
            measure_head(*head, device, asked.rounds, [size << 20 for size in asked.sizes], profiled=asked.profile)
    for case in TINY_CASES if asked.tiny else CASES:
        if asked.only in " ".join(map(str, case)):
            try:
                measure_case(*case, device, asked.rounds, profiled=asked.profile)
            except Exception:
                traceback.print_exc()
                print(f"{case} FAILED", flush=True)
                if dist.is_initialized():
                    dist.destroy_process_group()


if __name__ == "__main__":
    main()
