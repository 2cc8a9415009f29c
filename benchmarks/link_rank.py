"""What each rank runs for planner_on_links.py: steps of one model under many strategies, timed.

Rank 0 writes a line of JSON for each strategy that is done, so that new ranks can go on where some have failed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from types import MappingProxyType

import torch
import torch.distributed as dist
from gpt_model import GPT, Shape, make_up_batch, next_token_loss
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright import Job
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.describe.observe import make_batch
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.runtime.run import enter_world

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "wide": Shape(layers=4, width=128, heads=4, length=32, vocabulary=2048),
        "long": Shape(layers=4, width=64, heads=4, length=512, vocabulary=256),
    }
)
"""Many parameters and few tokens to compute, and the reverse: 1.06 million on 32 tokens, 0.25 million on 512."""
GLOBAL_BATCH = 8
WARM_UP, FEWEST, MOST = 2, 3, 7
"""Steps of a strategy that are not timed, and how many are, at least and at most."""
LONG_S = 3.0
"""Timed steps of a strategy end after this time, once there are `FEWEST`."""


def job_of(model: str) -> Job:
    shape = SHAPES[model]

    def build() -> nn.Module:
        return GPT(shape)

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return next_token_loss(logits, batch, reduction="sum"), batch["y"].numel()

    return Job(
        model=build,
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=lambda params: AdamW(params, lr=1e-4),
        sample=lambda n: make_up_batch(shape, n, torch.Generator().manual_seed(0)),
        global_batch=GLOBAL_BATCH,
    )


def time_steps(job: Job, facts: ModelFacts, strategy: Strategy, world: World) -> list[float]:
    """Seconds of each timed step, of the slowest rank; the same on every rank."""
    trainer = Trainer(job, facts, strategy.resolve(world.ranks), world, seed=0)
    batch = make_batch(job, job.global_batch)
    for _ in range(WARM_UP):
        trainer.step(batch)
    seconds: list[float] = []
    while len(seconds) < FEWEST or (len(seconds) < MOST and sum(seconds) < LONG_S):
        dist.barrier()
        start = perf_counter()
        float(trainer.step(batch).loss)  # reading it waits for the step
        took = torch.tensor(perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(float(took))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(SHAPES))
    parser.add_argument("strategies", type=Path, help="a JSON list of strategies")
    parser.add_argument("rows", type=Path, help="lines of JSON, one for each strategy that is done")
    options = parser.parse_args()
    job, done = job_of(options.model), read_rows(options.rows)
    world = enter_world("cpu")
    facts = describe(job)
    for text in json.loads(options.strategies.read_text()):
        if text in done:
            continue
        seconds = time_steps(job, facts, Strategy.parse(text), world)
        if world.is_main:
            with options.rows.open("a") as rows:
                rows.write(json.dumps({"strategy": text, "seconds": median(seconds), "steps": seconds}) + "\n")
    world.leave()


def read_rows(path: Path) -> dict[str, dict[str, object]]:
    """Rows so far, by strategy."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["strategy"]: row for row in map(json.loads, lines)}


if __name__ == "__main__":
    main()
