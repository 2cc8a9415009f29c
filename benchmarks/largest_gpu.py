"""The largest batch of `plan --largest` held against one real GPU: what is told, and where memory really ends.

    PYTHONPATH=src python benchmarks/largest_gpu.py --json docs/data/largest_gpu.json     # on the GPU; about 8 minutes

Each size is tried in a process of its own, which takes a few steps. `retries` counts how often the allocator had to
return memory to the device before a request could be met; such a step runs, but slower.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_cases import job_of
from gpu_steps import GIB, make_up_weights
from torch.utils._pytree import tree_map

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.api.largest import find_largest
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import Strategy

CASES = (
    ("preset:llama3.2-1b:seq=2048", "single,bf16", 1),
    ("preset:gpt2-xl", "single,bf16,ac=selective", 1),
    ("preset:vit-large", "single,bf16", 1),
    ("preset:resnet-152", "single,fp32", 1),
    ("preset:llama3.2-3b:seq=2048", "fsdp,bf16", 8),
)
STEPS = 4


def tell(answer: Connection, name: str, strategy: str, ranks: int) -> None:
    """What `plan --largest` says of a step with one micro-batch."""
    job = job_of(f"{name},batch={ranks}")
    planner = Planner(job, describe(job), job.global_batch)
    cluster = Cluster.parse(f"{ranks}xH200-141GB")
    sizes = find_largest(planner, cluster, PlanOptions(strategies=(strategy,))).results[0]
    assert sizes.batch is not None, sizes.reason
    answer.send(sizes.batch.to_json())


def take_steps(answer: Connection, name: str, strategy: str, ranks: int, samples: int) -> None:
    """Whether a few steps with this number of samples run on the GPU."""
    job = job_of(f"{name},batch={samples * ranks}")
    facts, batch = describe(job), make_batch(job, job.global_batch)
    world = replace(fake_world(ranks, torch.device("cuda", 0)), weightless=True)
    trainer = Trainer(job, facts, Strategy.parse(strategy).resolve(ranks), world, seed=0)
    make_up_weights(trainer)
    seconds = []
    try:
        for _ in range(STEPS):
            start = time.perf_counter()
            trainer.step(tree_map(lambda leaf: leaf.cuda() if torch.is_tensor(leaf) else leaf, batch))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        runs = True
    except torch.OutOfMemoryError:
        runs = False
    stats = torch.cuda.memory_stats()
    answer.send(
        {
            "runs": runs,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "retries": stats["num_alloc_retries"],
            "step_ms": median(seconds[1:]) * 1e3 if runs else None,
        }
    )


def in_process(function: Callable[..., None], *arguments: object) -> dict[str, Any]:
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(there, *arguments))
    process.start()
    there.close()
    assert here.poll(120), f"No answer to {arguments}"
    found: dict[str, Any] = here.recv()
    process.join(30)
    return found


def border(runs: Callable[[int], bool], low: int, high: int) -> int:
    """The largest size that runs; `low` should, and `high` should not."""
    while not runs(low):
        low, high = low - max(1, low // 16), low
    while runs(high):
        low, high = high, high + max(1, high // 16)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def measure(name: str, strategy: str, ranks: int) -> dict[str, Any]:
    start = time.perf_counter()
    limit = in_process(tell, name, strategy, ranks)
    told = limit["samples"]
    shown = {key: limit[key] for key in ("samples", "peak_gib", "reserved_gib", "next", "returns")}
    print(f"{name} {strategy} on {ranks}: {shown} in {time.perf_counter() - start:.0f} s", flush=True)
    tries: dict[int, dict[str, Any]] = {}

    def runs(samples: int) -> bool:
        if samples not in tries:
            tries[samples] = {"samples": samples, **in_process(take_steps, name, strategy, ranks, samples)}
            print("   ", tries[samples], flush=True)
        return bool(tries[samples]["runs"])

    return {
        "job": name,
        "strategy": strategy,
        "ranks": ranks,
        "told": limit,
        "runs_to": border(runs, told, told + 1),
        "tries": [tries[samples] for samples in sorted(tries)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose text holds this")
    options = parser.parse_args()
    rows = []
    for name, strategy, ranks in CASES:
        if options.only in f"{name} {strategy}":
            rows.append(measure(name, strategy, ranks))
            options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    print("| model | strategy | told | runs up to |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row['job']} | `{row['strategy']}` | {row['told']['samples']} | {row['runs_to']} |")


if __name__ == "__main__":
    main()
