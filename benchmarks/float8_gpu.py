"""What `fp8` gains on one GPU: single products, a Llama-8B shape under fsdp, and the loss of a small GPT.

    python benchmarks/float8_gpu.py                  # all three; --only products|llama|loss runs one
    python benchmarks/float8_gpu.py --tiny           # the script itself on a CPU, in seconds

`products` times a linear layer behind an activation, forward and backward, compiled, with scaling and rounding.
`llama` is rank 0 of a fake world of 64 with one sample of 8192 tokens: real memory and compute, no communication.
`loss` trains a GPT for 300 steps under bf16 and fp8. OUT=FOLDER also writes float8_gpu.json there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt_model import GPT, Shape, make_up_batch, next_token_loss
from torch import Tensor
from torch.optim import AdamW

from meshwright import Job, Strategy
from meshwright.assemble import float8
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World, fake_world
from meshwright.describe.model import describe
from meshwright.jobs.decoder import Shape as DecoderShape
from meshwright.jobs.decoder import decoder_job
from meshwright.strategies.float8_linear import E4M3, E5M2, float8_linear
from meshwright.torch_private.scaled_products import scaled_mm

GIB = 2**30
WORLD = 64
SIDES = (
    (4096, 4096),
    (4096, 1024),
    (4096, 14336),
    (2048, 2048),
    (1024, 4096),
    (14336, 4096),
    (2048, 8192),
)
LLAMA = DecoderShape(layers=32, width=4096, heads=32, kv_heads=8, feed_forward=14336, vocabulary=128256, length=8192)
STRATEGIES = ("fsdp,fp8,compile", "fsdp,bf16,compile")
EAGER = ("fsdp,fp8", "fsdp,bf16")


def time_of(run: Callable[[], Any], device: torch.device, times: int, turns: int = 2) -> float:
    """Milliseconds of a run, the best of some turns."""
    run()
    found = []
    for _ in range(turns):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(times):
            run()
        synchronise(device)
        found.append((time.perf_counter() - start) / times * 1e3)
    return min(found)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def raw(device: torch.device, *, tiny: bool) -> None:
    """Single products without rounding: in bf16, and in float8 by one scale per tensor and one per row."""
    rows = 32 if tiny else 8192
    for inner, outer in [(64, 48)] if tiny else SIDES:
        for kind, m, k, n in (
            ("forward", rows, inner, outer),
            ("of input", rows, outer, inner),
            ("of weight", outer, rows, inner),
        ):
            found = {word: round(ms, 4) for word, ms in raw_times(device, m, k, n).items()}
            report({"product": kind, "m": m, "k": k, "n": n, **found})


def raw_times(device: torch.device, m: int, k: int, n: int) -> dict[str, float]:
    """Milliseconds of one product of `m` rows and `n` columns that adds up `k` numbers."""
    a, b = (torch.randn(*sides, device=device, dtype=torch.bfloat16) for sides in ((m, k), (n, k)))
    found = {"bf16": time_of(lambda: a @ b.t(), device, 20)}
    b8 = b.to(E4M3).t()
    one = torch.ones((), device=device)
    by_row = {"scale_a": torch.ones(m, 1, device=device), "scale_b": torch.ones(1, n, device=device)}
    for word, dtype, scales in (
        ("e4m3", E4M3, {"scale_a": one, "scale_b": one}),
        ("e5m2", E5M2, {"scale_a": one, "scale_b": one}),
        ("rows", E4M3, by_row),
    ):
        for fast in (True, False):
            run = partial(scaled_mm, a.to(dtype), b8, **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
            found[word + "-fast" * fast] = time_of(run, device, 20)
    found["amax"] = time_of(lambda: a.abs().amax(), device, 20)
    found["turned"] = time_of(b8.contiguous, device, 20)
    return found


def products(device: torch.device, *, tiny: bool) -> None:
    rows, times = (32, 1) if tiny else (8192, 20)
    for inner, outer in [(64, 48)] if tiny else SIDES:
        x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(rows, outer, device=device, dtype=torch.bfloat16)

        found = {}
        for name, linear in (("bf16", F.linear), ("fp8", float8_linear)):
            behind = lambda x, weight, linear=linear: linear(F.silu(x), weight)  # noqa: E731
            torch._dynamo.reset()
            compiled = behind if tiny else torch.compile(behind)
            run = lambda call=compiled: torch.autograd.grad(call(x, weight), (x, weight), gradient)  # noqa: E731,B023
            found[name] = time_of(run, device, times)
        row = {"rows": rows, "in": inner, "out": outer, **{name: round(ms, 3) for name, ms in found.items()}}
        report({**row, "gain": round(found["bf16"] / found["fp8"], 2)})


def llama(
    device: torch.device, *, tiny: bool, layers: int = 32, eager: bool = False, show_kernels: bool = False
) -> None:
    """Steps of both precisions, taking turns: the host's speed varies, and it varies for both alike."""
    shape = (
        replace(LLAMA, layers=2, width=64, heads=8, feed_forward=96, vocabulary=128, length=32)
        if tiny
        else replace(LLAMA, layers=layers)
    )
    ranks, turns = (4, 1) if tiny else (WORLD, 5)
    job = decoder_job(shape, global_batch=ranks)
    facts, batch = describe(job), job.sample(ranks)
    for pair in (EAGER,) if tiny else (STRATEGIES, *((EAGER,) if eager else ())):
        world = fake_world(ranks, device)
        try:
            trainers = {text: trained(job, facts, text, world, batch) for text in pair}
            found: dict[str, list[float]] = {text: [] for text in pair}
            for _ in range(turns):
                for text, trainer in trainers.items():
                    found[text].append(time_of(partial(trainer.step, batch), device, 1 if tiny else 2, turns=1))
            medians = {text: sorted(times)[turns // 2] for text, times in found.items()}
            report({"ms": {text: round(ms, 1) for text, ms in medians.items()}, "turns": rounded_all(found)})
            report({"gain": round(medians[pair[1]] / medians[pair[0]], 3)})
            if device.type == "cuda":
                for text, trainer in trainers.items():
                    torch.cuda.reset_peak_memory_stats()
                    trainer.step(batch)
                    report({"strategy": text, "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 1)})
                    if show_kernels:
                        kernels(trainer, batch, text)
            del trainer, trainers
        finally:
            dist.destroy_process_group()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def trained(job: Job, facts: Any, text: str, world: World, batch: Any) -> Trainer:
    """A trainer after the two steps in which it compiles."""
    start = time.perf_counter()
    trainer = Trainer(job, facts, Strategy.parse(text).resolve(world.ranks), world, seed=0)
    losses = [trainer.step(batch).loss for _ in range(2)]
    print(f"  {text}: ready after {time.perf_counter() - start:.0f} s, losses {losses}", flush=True)
    return trainer


def rounded_all(found: dict[str, list[float]]) -> dict[str, list[float]]:
    return {text: [round(ms, 1) for ms in times] for text, times in found.items()}


KINDS = {
    "float8 products": r"nvjet.*q|e4m3|e5m2|f8|fp8",
    "attention": r"flash|fmha|attention|sdpa|cudnn",
    "bf16 products": r"nvjet|gemm|cutlass|cublas",
    "optimizer": r"adam|multi_tensor|foreach",
    "largest elements": r"triton_(red|per).*amax",
    "other reductions": r"triton_(red|per)",
    "fused, element by element": r"triton_",
    "copies": r"cat|copy|Copy|Memcpy|split|Memset|fill",
    "others": r"",
}


def kernels(trainer: Trainer, batch: Any, text: str) -> None:
    """Print the kernels of a step by kind, and the longest ones."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        trainer.step(batch)
        torch.cuda.synchronize()
    found = sorted(profiled.key_averages(), key=lambda row: -row.self_device_time_total)
    found = [row for row in found if row.self_device_time_total]
    kinds: dict[str, list[float]] = {kind: [0, 0.0] for kind in KINDS}
    for row in found:
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, row.key))
        kinds[kind][0] += row.count
        kinds[kind][1] = round(kinds[kind][1] + row.self_device_time_total / 1e3, 2)
    report({"strategy": text, "kernels: count, ms": kinds, "ms": round(sum(ms for _, ms in kinds.values()), 1)})
    for row in found[:40]:
        print(f"    {row.self_device_time_total / 1e3:8.2f} ms {row.count:5} {row.key[:150]}", flush=True)


def loss(device: torch.device, *, tiny: bool) -> None:
    """Losses of a small GPT under both precisions, with float8 in all its blocks."""
    shape = Shape(layers=4, width=256, heads=4, length=128, vocabulary=512)
    if tiny:
        shape = Shape(layers=2, width=64, heads=2, length=16, vocabulary=64)
    steps, samples = (10, 4) if tiny else (300, 32)
    made = [learnable(make_up_batch(shape, samples, torch.Generator().manual_seed(i))) for i in range(steps)]
    job = Job(
        model=lambda: GPT(shape),
        inputs=lambda batch: (batch["x"],),
        loss=lambda logits, batch: (next_token_loss(logits, batch, reduction="sum"), batch["y"].numel()),
        optimizer=lambda params: AdamW(params, lr=1e-3),
        sample=lambda count: make_up_batch(shape, count, torch.Generator().manual_seed(0)),
        global_batch=samples,
        max_norm=1.0,
    )
    facts = describe(job)
    with patch.object(float8, "SMALLEST", 1):
        runs = {word: losses_of(job, facts, f"single,{word}", made, device) for word in ("fp32", "bf16", "fp8")}
    last = {word: sum(found[-20:]) / len(found[-20:]) for word, found in runs.items()}
    far = max(abs(a - b) / b for a, b in zip(smooth(runs["fp8"]), smooth(runs["bf16"]), strict=True))
    report({"loss": last, "largest_relative_distance_of_means_over_20": far})


def learnable(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Text with a rule: each token follows from the one before."""
    x = batch["x"]
    size = int(x.max()) + 1
    start, steps = x[:, :1], torch.arange(x.shape[1] + 1)
    text = (start + 7 * steps + (steps**2) % 5) % size
    return {"x": text[:, :-1], "y": text[:, 1:]}


def losses_of(job: Job, facts: Any, text: str, made: list[Any], device: torch.device) -> list[float]:
    trainer = Trainer(job, facts, Strategy.parse(text).resolve(1), World(device=device), seed=0)
    return [trainer.step(batch).loss for batch in made]


def smooth(found: list[float]) -> list[float]:
    return [sum(found[max(0, i - 19) : i + 1]) / len(found[max(0, i - 19) : i + 1]) for i in range(len(found))]


ROWS: list[dict[str, Any]] = []


def report(row: dict[str, Any]) -> None:
    ROWS.append(row)
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--eager", action="store_true", help="also train the Llama shape without compile")
    parser.add_argument("--layers", type=int, default=LLAMA.layers, help="of the Llama shape")
    parser.add_argument("--kernels", action="store_true", help="also list the Llama shape's longest kernels")
    parser.add_argument("--only", choices=("products", "llama", "loss", "raw"))
    asked = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not asked.tiny else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for part in (llama, raw, products, loss):
        if asked.only in (None, part.__name__):
            print(f"== {part.__name__}", flush=True)
            with patch.object(float8, "SMALLEST", 1 if asked.tiny else float8.SMALLEST):
                chosen = {"layers": asked.layers, "eager": asked.eager, "show_kernels": asked.kernels}
                options = chosen if part is llama else {}
                part(device, tiny=asked.tiny, **options)
    if folder := os.environ.get("OUT"):
        Path(folder, "float8_gpu.json").write_text(json.dumps(ROWS, indent=1))


if __name__ == "__main__":
    sys.exit(main())
