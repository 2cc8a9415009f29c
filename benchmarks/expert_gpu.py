"""One rank of a Mixtral-8x7B shape with divided experts on a real GPU: its peak against the traced forecast.

    PYTHONPATH=src:benchmarks python benchmarks/expert_gpu.py --json docs/data/expert_gpu.json
    PYTHONPATH=src:benchmarks python benchmarks/expert_gpu.py --ranks 8 --strategy ep=8,fsdp,bf16,ac=full

The rank is one of a fake world: real tensors, weights made up on the device, and routing that is balanced, because
nothing arrives from other ranks. The forecast is the trace of the same step on fake tensors, on the same machine.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_steps import GIB, make_up_weights

import meshwright as mw
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape
from meshwright.jobs.mixture import Experts, mixture_job
from meshwright.tracing import trace_step

SHAPE = Shape(layers=32, width=4096, heads=32, kv_heads=8, feed_forward=14336, vocabulary=32000, length=4096)
EXPERTS = Experts(count=8, chosen=2, width=14336)
STEPS = 5


def job_for(ranks: int, samples: int, layers: int) -> mw.Job:
    """Mixtral 8x7B as published, or with fewer layers; `samples` of 4,096 tokens on each rank."""
    return mixture_job(replace(SHAPE, layers=layers), experts=EXPERTS, global_batch=ranks * samples)


def measure(job: mw.Job, facts: ModelFacts, strategy: Strategy, ranks: int) -> dict[str, Any]:
    world = replace(fake_world(ranks, torch.device("cuda", 0)), weightless=True)
    trainer = Trainer(job, facts, strategy, world, seed=0)
    make_up_weights(trainer)
    batch = make_batch(job, job.global_batch)
    trainer.step(batch)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        trainer.step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "step_ms": median(seconds) * 1e3,
        "device": torch.cuda.get_device_name(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1, help="samples of 4,096 tokens on each rank")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--strategy", default="ep=8,fsdp,bf16,ac=full")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    job = job_for(asked.ranks, asked.samples, asked.layers)
    facts, strategy = describe(job), Strategy.parse(asked.strategy).resolve(asked.ranks)
    trace = trace_step(job, facts, strategy, ranks=asked.ranks, rank=0)
    row = {
        "strategy": str(strategy),
        **{"ranks": asked.ranks, "samples": asked.samples, "layers": asked.layers},
        "parameters": sum(parameter.count for parameter in facts.parameters),
        "traced_gib": sum(trace.memory.values()) / GIB,
        "traced_reserved_gib": trace.reserved / GIB,
        "traced_by_cause_gib": {cause: size / GIB for cause, size in trace.memory.items()},
    }
    if torch.cuda.is_available():
        row |= measure(job, facts, strategy, asked.ranks)
        row["error"] = row["traced_gib"] / row["peak_gib"] - 1
    print(json.dumps(row, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
