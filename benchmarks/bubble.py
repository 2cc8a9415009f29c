"""How much of a pipeline's time is idle: simulated with no process, and measured on CPU ranks.

    python benchmarks/bubble.py --ranks 4 --json bubble.json

Every rank notes when it computes. A step lasts from the first start to the last end over all ranks; what no rank spends
computing is idle. Beside it stand the closed form, and the schedule simulated with each stage's own measured costs.
Ranks need a core each, or they take turns on it and look busy while they wait.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing
from gpt_model import GPT, Shape, make_up_batch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from meshwright import Job
from meshwright.assemble.pipeline import PipelinePasses
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import join
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.strategy import Strategy
from meshwright.schedules import make, simulate

# A small vocabulary, so that the stages with the embedding and the head cost little more than the others.
SHAPE = Shape(layers=8, width=256, heads=8, length=128, vocabulary=64)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv")
WARMUP = 2
TOLD_APART = 0.03


def build() -> nn.Module:
    return GPT(SHAPE)


def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    y = batch["y"]
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def job_of(samples: int) -> Job:
    return Job(
        model=build,
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=lambda params: AdamW(params, lr=1e-4),
        sample=lambda n: make_up_batch(SHAPE, n, torch.Generator().manual_seed(0)),
        global_batch=samples,
    )


def one_rank(rank: int, port: int, folder: str, options: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    device = torch.device("cpu")
    world = join(rank=rank, ranks=options.ranks, local_rank=rank, local_ranks=options.ranks, device=device)
    job = job_of(options.micro_batches * options.samples)
    facts = describe(job)
    batch = make_batch(job, job.global_batch)
    found: dict[str, list[Any]] = {}
    for name in options.schedules:
        strategy = Strategy.parse(f"pp={options.ranks}:{name},mb={options.samples}").resolve(options.ranks)
        trainer = Trainer(job, facts, strategy, world, seed=0)
        assert isinstance(trainer.passes, PipelinePasses)
        steps: list[Any] = []
        for _ in range(WARMUP + options.steps):
            trainer.step(batch)
            steps.append([(event.action, event.start, event.end) for event in trainer.passes.events])
        found[name] = world.gather(steps[WARMUP:])
    if rank == 0:
        Path(folder, "events.json").write_text(json.dumps(found))
    world.leave()


def judge(
    name: str, by_rank: list[list[list[tuple[str, float, float]]]], options: argparse.Namespace
) -> dict[str, Any]:
    """One row: what was measured, and what was simulated."""
    idle, costs = [], defaultdict(list)
    for step in zip(*by_rank, strict=True):
        events = [event for rank in step for event in rank]
        length = max(end for _, _, end in events) - min(start for _, start, _ in events)
        idle.append(1 - sum(end - start for _, start, end in events) / (length * options.ranks))
        for action, start, end in events:
            stage, kind = action.rstrip("0123456789")[:-1], action.rstrip("0123456789")[-1]
            costs[kind, int(stage)].append(end - start)
    schedule = make(name, options.ranks, options.micro_batches)
    typical = {key: median(values) for key, values in costs.items()}
    forward = [typical["F", stage] for stage in range(schedule.stages)]
    if ("I", schedule.stages - 1) in typical:
        # The first stage has no input to differentiate for: all of its backward pass is W.
        inputs = [typical.get(("I", stage), 0.0) for stage in range(schedule.stages)]
        weights = [typical.get(("W", stage), 0.0) for stage in range(schedule.stages)]
    else:
        inputs = [typical["B", stage] / 2 for stage in range(schedule.stages)]
        weights = inputs
    return {
        "schedule": name,
        "closed_form": simulate(schedule).bubble,
        "simulated": simulate(schedule, forward=forward, backward_input=inputs, backward_weight=weights).bubble,
        "measured": median(idle),
        "measured_steps": idle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="in a micro-batch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, args=(port, folder, options), nprocs=options.ranks)
        found = json.loads(Path(folder, "events.json").read_text())
    rows = [judge(name, found[name], options) for name in options.schedules]
    print(f"{'schedule':12} {'closed form':>11} {'simulated':>10} {'measured':>9}")
    for row in rows:
        print(f"{row['schedule']:12} {row['closed_form']:11.1%} {row['simulated']:10.1%} {row['measured']:9.1%}")
    if options.json:
        where = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        asked = {"ranks": options.ranks, "micro_batches": options.micro_batches, "samples": options.samples}
        options.json.write_text(json.dumps({**where, **asked, "steps": options.steps, "rows": rows}, indent=1) + "\n")
    if wrong := [pair for pair in combinations(rows, 2) if disagree(*pair)]:
        names = " and ".join(row["schedule"] for row in wrong[0])
        sys.exit(f"the order of the measured bubbles is not that of the simulated ones: {names}")


def disagree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two schedules that the simulation tells apart were measured the other way round."""
    expected, found = (one[key] - other[key] for key in ("simulated", "measured"))
    return abs(expected) > TOLD_APART and expected * found < 0


if __name__ == "__main__":
    main()
