"""Training steps on one GPU beside hand-written models, Accelerate, Lightning Fabric and torchtitan, in one run.

    PYTHONPATH=src python benchmarks/gpu_speed.py --json docs/data/gpu_speed.json --torchtitan FOLDER
    PYTHONPATH=src python benchmarks/gpu_speed.py --only 8B GPT --json docs/data/gpu_speed.json   # some rows, merged
    PYTHONPATH=src python benchmarks/gpu_speed.py --table docs/data/gpu_speed.json                # as markdown
    PYTHONPATH=src python benchmarks/gpu_speed.py --tiny                                          # the paths, on a CPU

Each way of a row has a process of its own and is rank 0 of a world whose other ranks do not exist (`lone_rank.py`):
memory and kernels of one rank, nothing sent. All start from the same weights (`same_start.py`) on the same text, in
bf16 with fp32 masters, fused AdamW, clipping to 1. The losses of the first steps must agree with the hand-written
model's, or the numbers do not count and the script exits with 1. Each result is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from kernel_kinds import floors, profile, rates, wait
from own_process import Child
from same_start import Sizes
from speed_results import Results
from speed_table import tables
from speed_ways import make_step

TENSOR = ("tp=8,bf16", "hand-written", "tp=8,bf16,compile", "hand-written, compiled")
EAGER = ("tp=8,bf16", "fsdp,bf16", "hand-written")
PEERS = ("Accelerate", "Lightning Fabric", "torchtitan")
SHARDED = (
    "fsdp,bf16",
    "hand-written",
    "fsdp,bf16,compile",
    "hand-written, compiled",
    *PEERS,
    "fsdp,bf16,compile,loss=pieced",
    "fsdp,fp8,compile",
)
GPT = ("single,bf16,compile", "hand-written, one graph", "hand-written, model compiled", *PEERS[:2])
LLAMA_1B = Sizes(16, 2048, 32, 8, 8192, 128256, 2048, 8)
LLAMA_3B = Sizes(28, 3072, 24, 8, 8192, 128256, 2048, 8)
LLAMA_8B = Sizes(32, 4096, 32, 8, 14336, 128256, 8192, 1)
GPT_124M = Sizes(12, 768, 12, 12, 3072, 50304, 1024, 16)
TINY = {"layers": 2, "width": 64, "heads": 8, "kv_heads": 8, "feed_forward": 128, "vocabulary": 256, "length": 16}
FIRST_LOSSES = 3


@dataclass(frozen=True)
class Row:
    """A model and a batch under one kind of strategy, in several ways."""

    sizes: Sizes
    ranks: int
    family: str
    """"tensor", "sharded", "single" or "gpt"."""
    ways: tuple[str, ...]
    steps: int

    @property
    def tensor_ranks(self) -> int:
        return self.ranks if self.family == "tensor" else 1

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.tensor_ranks


ROWS = {
    "Llama-8B shape, 1x8192, fsdp of 64": Row(LLAMA_8B, 64, "sharded", SHARDED, 8),
    "GPT 124M, 16x1024, single": Row(GPT_124M, 1, "gpt", GPT, 30),
    "Llama-1B shape, 8x2048, single": Row(
        LLAMA_1B, 1, "single", ("single,bf16,compile", "hand-written, one graph"), 12
    ),
    "Llama-3B shape, 8x2048, tp=8": Row(LLAMA_3B, 8, "tensor", TENSOR, 15),
    "Llama-8B shape, 4x8192, tp=8": Row(replace(LLAMA_8B, samples=4), 8, "tensor", TENSOR, 8),
}


def tiny(row: Row) -> Row:
    return replace(row, sizes=replace(row.sizes, **TINY, samples=2), ranks=min(row.ranks, 8), steps=2)


def changed(row: Row, steps: int | None, layers: int | None) -> Row:
    return replace(row, steps=steps or row.steps, sizes=replace(row.sizes, layers=layers or row.sizes.layers))


def measure(row: Row, way: str, kind: str, torchtitan: Path | None) -> dict[str, Any]:
    """One way of a row, in a process that does nothing else."""
    if kind == "cpu":
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    started = time.perf_counter()
    step = make_step(row.family, row.sizes, row.ranks, way, device, torchtitan)
    losses = [float(step()) for _ in range(FIRST_LOSSES)]
    wait(device)
    gc.collect()
    gc.freeze()  # as the command line does, for all ways alike
    found = {"start_s": round(time.perf_counter() - started, 1), "losses": losses}
    return found | (timed_on_gpu(step, row.steps) if kind == "cuda" else timed_on_cpu(step, row.steps))


def timed_on_gpu(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Steps that follow one another without waiting, as in training; then some that wait, for the host's time."""
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    taken = [first.elapsed_time(second) for first, second in pairwise(events)]
    peak = torch.cuda.max_memory_allocated() / 2**30
    host = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
    found = {**summary(taken), "host_ms": round(min(host), 1), "peak_gib": round(peak, 2)}
    return found | {"kernels_ms": profile(step)}


def timed_on_cpu(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        taken.append(1e3 * (time.perf_counter() - start))
    return summary(taken)


def summary(taken: list[float]) -> dict[str, Any]:
    low, _, high = quantiles(taken, n=4)
    return {"ms": round(median(taken), 2), "quartiles_ms": [round(low, 2), round(high, 2)]}


def measure_rates(rows: dict[str, Row], kind: str) -> dict[str, Any]:
    """The device's rates for each row, and the floors that follow."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    found = {}
    for name, row in rows.items():
        rate = rates(row.sizes, row.tensor_ranks, device)
        ranks = {"tensor_ranks": row.tensor_ranks, "data_ranks": row.data_ranks}
        found[name] = {
            "tflops": round(rate["flops"] / 1e12, 3),
            "tbytes": round(rate["bytes"] / 1e12, 3),
            "floors_ms": floors(row.sizes, **ranks, gated=row.family != "gpt", rate=rate),
        }
    return found


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names contain one of these")
    parser.add_argument("--ways", nargs="+", help="only these ways, or others than the rows' own")
    parser.add_argument("--steps", type=int, help="timed steps, instead of each row's own number")
    parser.add_argument("--layers", type=int, help="another number of layers, to try the paths in short time")
    parser.add_argument("--torchtitan", type=Path, metavar="FOLDER", help="checkout of torchtitan, v0.2.2")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="begin nothing after this time")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU, eager")
    parser.add_argument("--json", type=Path, help="write results there, merged with those already there")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print these results as markdown; measure nothing")
    return parser.parse_args()


def run_all(rows: dict[str, Row], results: Results, kind: str, asked: argparse.Namespace) -> None:
    """Measure one way after the other, each as soon as the one before it has ended."""
    started = time.monotonic()
    tasks = [(name, way) for name, row in rows.items() for way in asked.ways or row.ways]
    found = Child(measure_rates, rows, kind).result()
    results.add_rates(found)
    print(json.dumps(found), flush=True)
    coming: Child | None = None
    for number, (name, way) in enumerate(tasks):
        if time.monotonic() - started > asked.budget:
            print(f"no time left for {len(tasks) - number} ways, the first is {way} of {name}", flush=True)
            break
        child = coming or start(tasks[number], rows, kind, asked)
        child.begin()
        # What compiles has not begun to measure when the next process has imported everything.
        early = number + 1 < len(tasks) and way not in EAGER
        coming = start(tasks[number + 1], rows, kind, asked) if early else None
        found = child.result()
        results.add(name, way, {"ranks": rows[name].ranks, **found})
        print(f"{time.monotonic() - started:.0f} s", json.dumps({"row": name, "way": way, **found}), flush=True)
    if coming is not None:
        coming.end()


def start(task: tuple[str, str], rows: dict[str, Row], kind: str, asked: argparse.Namespace) -> Child:
    name, way = task
    return Child(measure, rows[name], way, kind, asked.torchtitan)


def main() -> int:
    asked = parse_options()
    if asked.table:
        print(tables(json.loads(asked.table.read_text()), list(ROWS)))
        return 0
    kind = "cpu" if asked.tiny else "cuda"
    rows = {name: row for name, row in ROWS.items() if any(part in name for part in asked.only)}
    rows = {name: tiny(row) if asked.tiny else row for name, row in rows.items()}
    rows = {name: changed(row, asked.steps, asked.layers) for name, row in rows.items()}
    results = Results(asked.json, kind)
    run_all(rows, results, kind, asked)
    apart = results.judge(list(rows))
    print(tables(results.document, list(rows)))
    for sentence in apart:
        print(f"THESE NUMBERS DO NOT COUNT: {sentence}", file=sys.stderr)
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
