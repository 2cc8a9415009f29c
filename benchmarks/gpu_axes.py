"""Show on a machine with one GPU that tensor, operator, layer-wise and pipeline parallelism run on CUDA too.

    PYTHONPATH=src python benchmarks/gpu_axes.py --json gpu_axes.json
    PYTHONPATH=src python benchmarks/gpu_axes.py --device cpu --small      # the same paths, without a GPU

1. `layers=2` over `cuda:0` and `cpu`, in one process: the losses and gradient norms of `single` on the GPU.
2. One rank after another of a fake world, under tp, op, pp and hybrids: steps run; bytes of parameters, gradients and
   optimizer on each rank against an even share; peak memory and the time of a step without communication.

Each case has a process of its own: worlds of one process share caches that remember the others. A case that fails is a
row with its error; the others go on. Exit 1 if one failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, Shape, make_up_batch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from meshwright import Job
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World, alone, fake_world
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.strategy import Strategy
from meshwright.runtime.measure import held_states, peak_bytes

SMALL = Shape(layers=4, width=64, heads=4, length=32, vocabulary=256)
LARGE = Shape(layers=24, width=1024, heads=16, length=1024, vocabulary=50304)
SAMPLES = 16
STEPS = 5
CASES: list[tuple[str, int]] = [
    ("tp=2", 2),
    ("tp=8", 8),
    ("tp=2,fsdp", 8),
    ("tp=4,ddp", 8),
    ("op=2", 2),
    ("pp=2:gpipe", 2),
    ("pp=4:1f1b", 4),
    ("pp=2:interleaved", 2),
    ("pp=2:zb", 2),
    ("pp=2:zbv", 2),
    ("layers=2", 2),
    ("pp=2:1f1b,fsdp", 8),
    ("pp=2:interleaved,fsdp", 8),
    ("tp=2,pp=2:1f1b", 4),
    ("tp=2,pp=2:1f1b,fsdp=2", 8),
    ("tp=2,pp=2:1f1b,fsdp=2,bf16", 8),
    ("tp=2,pp=2:1f1b,fsdp=2,bf16,ac=full", 8),
]


def build(shape: Shape) -> nn.Module:
    return GPT(shape)


def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    y = batch["y"]
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def job_of(shape: Shape) -> Job:
    return Job(
        model=partial(build, shape),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=lambda params: AdamW(params, lr=1e-4),
        sample=lambda n: make_up_batch(shape, n, torch.Generator().manual_seed(0)),
        global_batch=SAMPLES,
        max_norm=1.0,
    )


def run_layers(shape: Shape, kind: str) -> dict[str, Any]:
    """Two devices of one process against one."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    job = job_of(shape)
    facts, batch = describe(job), make_batch(job, 4)
    first = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    world = alone(first)
    one = Trainer(job, facts, Strategy.parse("single"), world, seed=0)
    two = Trainer(job, facts, Strategy.parse("layers=2"), world, seed=0, devices=[first, torch.device("cpu")])
    pairs = [(one.step(batch), two.step(batch)) for _ in range(3)]
    places = {parameter.device for parameter in two.engine.model.parameters()}
    return {
        "case": f"layers=2 over {first} and cpu",
        "ok": True,
        "loss_max_rel": max(abs(a.loss - b.loss) / abs(a.loss) for a, b in pairs),
        "norm_max_rel": max(abs(a.grad_norm - b.grad_norm) / abs(a.grad_norm) for a, b in pairs),
        "parameter_bytes": {
            str(place): sum(p.nbytes for p in two.engine.model.parameters() if p.device == place) for place in places
        },
    }


def run_rank(shape: Shape, kind: str, text: str, ranks: int, rank: int) -> dict[str, Any]:
    """One rank of a fake world."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    job = job_of(shape)
    facts, batch = describe(job), make_batch(job, job.global_batch)
    world = fake_world(ranks, device, rank=rank)
    strategy = Strategy.parse(text).resolve(ranks)
    trainer = Trainer(job, facts, strategy, world, seed=0)
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.step(batch)
    trainer.forward_backward(batch)
    held = held_states(trainer).memory
    trainer.update()
    seconds = timed_steps(trainer, batch, world)
    whole = sum(p.count * p.itemsize for p in facts.parameters)
    share = whole / strategy.model_ranks / (strategy.shards if strategy.data else 1)
    peak = peak_bytes(device)
    del trainer
    gc.collect()
    dist.destroy_process_group()
    return {
        "case": f"{text} as {rank} of {ranks}",
        "ok": True,
        "parameters_of_even_share": held["parameters"] / share,
        "gradients_of_even_share": held["gradients"] / share,
        "optimizer_of_even_share": held["optimizer"] / share / 2,
        "peak_gib": peak / 2**30,
        "step_ms": median(seconds) * 1e3,
    }


def timed_steps(trainer: Trainer, batch: Any, world: World) -> list[float]:
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        trainer.step(batch)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def attempt(task: tuple[Any, ...]) -> dict[str, Any]:
    function, *args = task
    try:
        found: dict[str, Any] = function(*args)
        return found
    except Exception as error:
        traceback.print_exc()
        case = " ".join(map(str, args[2:])) or "layers=2 in one process"
        return {"case": case, "ok": False, "error": f"{type(error).__name__}: {error}"}


def ranks_of_interest(text: str, ranks: int) -> list[int]:
    """The first rank of each place on the pipeline axis: the others of that place hold as much."""
    strategy = Strategy.parse(text).resolve(ranks)
    stages = strategy.stage_ranks
    return [place * ranks // stages for place in range(stages)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parallel", type=int, default=1, help="cases at the same time; then step times say little")
    parser.add_argument("--strategies", nargs="+", help="some of the cases, beside layers=2 in one process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SMALL if options.small else LARGE
    tasks: list[tuple[Any, ...]] = [(run_layers, SMALL, options.device)]
    for text, ranks in [case for case in CASES if options.strategies is None or case[0] in options.strategies]:
        tasks += [(run_rank, shape, options.device, text, ranks, rank) for rank in ranks_of_interest(text, ranks)]
    with ProcessPoolExecutor(options.parallel, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = []
        for row in pool.map(attempt, tasks):
            rows.append(row)
            print(row, flush=True)
    failed = [row["case"] for row in rows if not row["ok"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} ran" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if options.json:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        document = {
            "device": device,
            "torch": torch.__version__,
            "model": vars(shape),
            "samples": SAMPLES,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
