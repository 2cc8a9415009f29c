"""Steps of one GPU beside hand-written models, each as rank 0 of a fake world: time, peak memory, kinds of kernels.

    PYTHONPATH=src python benchmarks/gpu_speed.py --json docs/data/gpu_speed.json
    PYTHONPATH=src python benchmarks/gpu_speed.py --tiny      # the same paths on a CPU

Nothing is sent, so a time is what a rank computes and launches. Every case has a process of its own. A row is printed
as soon as it is measured; one that fails says why, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hand_written import Sizes, sharded_step, tensor_step
from torch import Tensor

LLAMA_1B = Sizes(16, 2048, 32, 8, 8192, 128256, 2048, 8)
LLAMA_3B = Sizes(28, 3072, 24, 8, 8192, 128256, 2048, 8)
LLAMA_8B = Sizes(32, 4096, 32, 8, 14336, 128256, 8192, 1)
TINY = {"layers": 2, "width": 64, "heads": 8, "kv_heads": 8, "feed_forward": 128, "vocabulary": 256, "length": 16}
WORKLOADS = {
    "3B, 8x2048, tp=8": (LLAMA_3B, 8, ["tp=8,bf16", "tp=8,bf16,compile", "by hand", "by hand, compiled"]),
    "8B, 4x8192, tp=8": (
        replace(LLAMA_8B, samples=4),
        8,
        ["tp=8,bf16", "tp=8,bf16,compile", "by hand", "by hand, compiled"],
    ),
    "8B, 1x8192, fsdp of 64": (LLAMA_8B, 64, ["fsdp,bf16", "fsdp,bf16,compile", "by hand", "by hand, compiled"]),
    "1B, 8x2048, single": (LLAMA_1B, 1, ["single,bf16", "single,bf16,compile"]),
}
KINDS = {
    "products": ("gemm", "nvjet", "cutlass", "sm90_xmma", "splitK"),
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "optimizer": ("multi_tensor", "adam", "foreach"),
}
STEPS = 12


def our_step(sizes: Sizes, text: str, ranks: int, device: torch.device) -> Callable[[], Tensor]:
    from meshwright.assemble.step import Trainer
    from meshwright.assemble.world import fake_world
    from meshwright.describe.model import describe
    from meshwright.describe.observe import make_batch
    from meshwright.facts.strategy import Strategy
    from meshwright.jobs.decoder import Shape, decoder_job

    names = ("layers", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "length")
    shape = Shape(**{name: getattr(sizes, name) for name in names})
    strategy = Strategy.parse(text).resolve(ranks)
    job = decoder_job(shape, global_batch=sizes.samples * strategy.data_ranks)
    facts = describe(job)
    trainer = Trainer(job, facts, strategy, fake_world(ranks, device), seed=0)
    batch = {name: tensor.to(device) for name, tensor in make_batch(job, sizes.samples).items()}
    return lambda: trainer.step(batch).loss_tensor


def make_step(sizes: Sizes, way: str, ranks: int, tensor: bool, device: torch.device) -> Callable[[], Tensor]:
    if not way.startswith("by hand"):
        return our_step(sizes, way, ranks, device)
    from meshwright.assemble.world import fake_world

    fake_world(ranks, device)
    compiled = way.endswith("compiled")
    if tensor:
        return tensor_step(sizes, ranks, device, compiled=compiled)
    return sharded_step(sizes, device, compiled=compiled)


def measure(task: tuple[str, str, str, bool]) -> dict[str, Any]:
    workload, way, kind, tiny = task
    if kind == "cpu":
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    sizes, ranks, _ = WORKLOADS[workload]
    sizes = replace(sizes, **TINY, samples=ranks if "fsdp" in workload and tiny else 2) if tiny else sizes
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    row: dict[str, Any] = {"workload": workload, "way": way}
    started = time.perf_counter()
    try:
        step = make_step(sizes, way, ranks, "tp" in workload, device)
        for _ in range(3):
            step()
        wait(device)
        gc.collect()
        gc.freeze()  # as the command line does, for all ways alike
        row["start_s"] = round(time.perf_counter() - started, 1)
        return row | timed(step, device)
    except Exception as error:
        traceback.print_exc()
        return row | {"error": f"{type(error).__name__}: {error}"[:300]}


def timed(step: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    whole, host = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        wait(device)
        whole.append(time.perf_counter() - start)
    found = {"ms": round(1e3 * min(whole), 1), "host_ms": round(1e3 * min(host), 1)}
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        found |= {"kernels_ms": kernels(step)}
    return found


def kernels(step: Callable[[], Tensor]) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found = dict.fromkeys((*KINDS, "other", "all", "launches"), 0.0)
    for event in profile.key_averages():
        name, taken = event.key, event.self_device_time_total / 1e3
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
        found[kind] += taken
        found["all"] += taken
        found["launches"] += event.count
    return {kind: round(taken, 1) for kind, taken in found.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="workloads whose names contain one of these")
    parser.add_argument("--ways", nargs="+", help="only these ways, or others than the workload's own")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    kind = "cpu" if asked.tiny else "cuda"
    tasks = [
        (workload, way, kind, asked.tiny)
        for workload, (_, _, ways) in WORKLOADS.items()
        for way in asked.ways or ways
        if any(part in workload for part in asked.only)
    ]
    rows = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for row in pool.map(measure, tasks):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if asked.json:
        where = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if kind == "cuda" else kind}
        asked.json.write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
