"""Seconds and memory until one rank of a large world has its initial weights: recorded, laid out, and filled.

    python benchmarks/start_up.py --job preset:llama3-8b --strategy fsdp --ranks 8

The other ranks are made up; what this one holds is real. Memory is the process's resident peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch

from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="preset:llama3-8b")
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--ranks", type=int, default=8)
    asked = parser.parse_args()
    job = load_job(asked.job)
    facts = describe(job)
    before = peak_gib()
    started, cpu = time.perf_counter(), time.process_time()
    world = fake_world(asked.ranks, torch.device("cpu"))
    Trainer(job, facts, Strategy.parse(asked.strategy).resolve(asked.ranks), world, seed=0)
    print(
        json.dumps(
            {
                "job": asked.job,
                "strategy": asked.strategy,
                "ranks": asked.ranks,
                "seconds": round(time.perf_counter() - started, 1),
                "cpu_seconds": round(time.process_time() - cpu, 1),
                "peak_gib_before": round(before, 2),
                "peak_gib": round(peak_gib(), 2),
            }
        )
    )


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
