"""What ranks do with checkpoints in tests: train, save, load under another strategy, train on."""

from __future__ import annotations

import gc
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from checkpoint_contents import Distance, Yardstick, first_change
from checkpoint_jobs import job_of
from meshwright.assemble.batch import Batch
from meshwright.assemble.world import World
from meshwright.errors import CheckpointError
from meshwright.facts.model import ModelFacts
from meshwright.runtime.run import Run, setup

BEFORE = AFTER = 3


@dataclass(frozen=True)
class Stretch:
    """What some steps in a row gave, the same on every rank."""

    losses: list[float]
    batches: list[str]
    """A digest of each global batch: its samples in their order."""
    position: int
    """The global sample index afterwards."""


@dataclass(frozen=True)
class Arrival:
    """What came of one checkpoint under another strategy."""

    changed: str | None
    """What is not the same, bit by bit, in the checkpoint that is saved again right after loading."""
    stretch: Stretch
    distance: Distance | None
    """Of the end from the end of a run that was not interrupted; None where the dtype of parameters changed."""


@dataclass(frozen=True)
class Setup:
    """What a rank lays out."""

    job: str
    facts: ModelFacts
    strategy: str


def make_run(world: World, setting: Setup) -> Run:
    job = job_of(setting.job, setting.strategy)
    torch.manual_seed(world.rank)  # whatever state the pool's generators are in: each test begins alike
    return setup(job, setting.strategy, facts=setting.facts, world=world)


def train_and_save(world: World, setting: Setup, target: str, steps: int = BEFORE) -> Stretch:
    run = make_run(world, setting)
    _let_loss_scale_move(run)
    stretch = take_steps(run, steps)
    run.save(target)
    return stretch


def resume_and_save(world: World, setting: Setup, source: str, target: str, steps: int) -> Stretch:
    """Go on from a checkpoint and save another one."""
    run = make_run(world, setting)
    run.load(source)
    stretch = take_steps(run, steps)
    run.save(target)
    return stretch


def train_and_save_twice(world: World, setting: Setup, half: str, whole: str) -> None:
    """On the way and at the end."""
    run = make_run(world, setting)
    _let_loss_scale_move(run)
    take_steps(run, BEFORE)
    run.save(half)
    take_steps(run, AFTER)
    run.save(whole)


def go_on(
    world: World, setting: Setup, sources: list[str], expected: str, scratch: str, lossy: bool = False
) -> list[Arrival]:
    """From each checkpoint: save it again at once, train on, measure how far that is from the `expected` end.

    `lossy` is for another dtype of the parameters than the checkpoint's: then what is saved again is the same in it.
    """
    gc.freeze()  # or every other save waits for a look at all that torch ever made
    run = make_run(world, setting)
    yardstick = None if lossy else Yardstick(Path(expected))
    again = Path(scratch, "again")
    arrivals = []
    for source in sources:
        run.load(source)
        run.save(again)
        changed = first_change(again, Path(source), lossy=lossy) if world.is_main else None
        if world.is_main:
            shutil.rmtree(again)
        stretch = take_steps(run, AFTER)
        changes, distances = zip(*world.gather((changed, yardstick and yardstick.measure(run))), strict=True)
        arrivals.append(Arrival(changes[0], stretch, max(filter(None, distances), default=None)))
    return arrivals


def refuse(world: World, setting: Setup, folders: list[str], failing: int | None = None) -> list[str]:
    """What loading each checkpoint is refused with; nothing is touched. The disk of the rank `failing` fails."""
    run = make_run(world, setting)
    before = {name: tensor.clone() for name, tensor in run.state().items()}
    refusals = []
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == failing:
            patch.setattr("meshwright.checkpoint.integrity._sha256", _fail_to_read)
        for folder in folders:
            with pytest.raises(CheckpointError) as caught:
                run.load(folder)
            refusals.append(f"{caught.type.__name__}: {caught.value}")
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.state().items())
    assert run.trainer.steps == 0 and not run.trainer.optimizer.state
    take_steps(run, 1)
    return refusals


def _fail_to_read(file: Any, *args: Any) -> Any:
    raise OSError(5, "Input/output error", "rank 1's file")


def take_steps(run: Run, steps: int) -> Stretch:
    losses, batches = [], []
    for batch in run.batches(steps=steps):
        batches.append(_digest(run.world, batch))
        losses.append(run.step(batch).loss)
    return Stretch(losses, batches, run.position)


def _let_loss_scale_move(run: Run) -> None:
    """fp16 begins low enough not to overflow, and grows after two steps: a target must take that over."""
    if run.trainer.loss_scale is not None:
        run.trainer.loss_scale.value, run.trainer.loss_scale.interval = 2.0**8, 2


def _digest(world: World, batch: Batch) -> str:
    """Of a global batch, put together from the parts of all ranks."""
    samples: dict[int, str] = {}
    for own in world.gather(_samples_of(batch)):
        for place, digest in own.items():
            assert samples.setdefault(place, digest) == digest, f"two ranks have unlike samples at {place}"
    assert sorted(samples) == list(range(batch.samples)), f"of {batch.samples} samples, ranks have {sorted(samples)}"
    return hashlib.sha256("".join(samples[place] for place in sorted(samples)).encode()).hexdigest()


def _samples_of(batch: Batch) -> dict[int, str]:
    """A digest of each of this rank's samples, by its place in the global batch."""
    return {
        piece.span.first + row: hashlib.sha256(
            b"".join(leaf[row].numpy().tobytes() for leaf in tree_leaves(piece.data))
        ).hexdigest()
        for piece in batch.pieces
        for row in range(piece.span.length)
    }
