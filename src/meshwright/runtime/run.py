"""`setup` and `Run`: the public interface of a job that trains under a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.assemble.batch import Batch
from meshwright.assemble.check import check, check_engine_config, refuse_missing_gpus
from meshwright.assemble.step import Trainer
from meshwright.assemble.step_result import StepResult
from meshwright.assemble.world import PATIENCE, World, alone, join
from meshwright.checkpoint.folder import find_checkpoint
from meshwright.checkpoint.frozen import fingerprints
from meshwright.checkpoint.load import load
from meshwright.checkpoint.manifest import RunState
from meshwright.checkpoint.save import Saver, save_at
from meshwright.describe.model import describe
from meshwright.environment import LaunchedRank, announce, launched, restart_count
from meshwright.errors import Refused
from meshwright.facts.job import TRAINED, Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.position import DataPosition
from meshwright.facts.strategy import Strategy
from meshwright.launch.network import bind_launched
from meshwright.runtime.data import Loader
from meshwright.runtime.evaluation import EvaluationData
from meshwright.runtime.open_loader import open_loader
from meshwright.runtime.place import choose_device, place_for, place_of
from meshwright.runtime.start_check import check_start
from meshwright.strategies.deepspeed.user_config import understood


class Run:
    """A job laid out by `setup`. A training loop needs only `batches` and `step`."""

    def __init__(self, trainer: Trainer, *, workers: int = 0) -> None:
        """All ranks must make one together, before the first step."""
        self.trainer = trainer
        self.strategy, self.world, self.facts = trainer.strategy, trainer.world, trainer.facts
        self._workers = workers
        self._position = DataPosition()
        self._loader: Loader | None = None
        self._evaluated: EvaluationData | None = None
        self._saver: Saver | None = None
        if trainer.job.save == TRAINED and not trainer.world.fake:
            trainer.base = fingerprints(trainer)

    @property
    def position(self) -> int:
        """The global sample index after the last batch handed out."""
        return self.data_position.samples

    @property
    def data_position(self) -> DataPosition:
        """The place in the data after the last batch handed out: all that a checkpoint needs to continue there."""
        return self._position if self._loader is None else self._loader.data_position

    @property
    def steps_per_epoch(self) -> int | None:
        """None if the end of the data is not known beforehand. Its first use is collective, like `batches`."""
        return self.loader.steps_per_epoch

    @property
    def loader(self) -> Loader:
        """The object that reads the job's data. Its first use is collective: all ranks must take part."""
        if self._loader is None:
            self._loader = open_loader(self.trainer, workers=self._workers, position=self._position)
        return self._loader

    def end_loading(self) -> None:
        """End the processes that load data. More batches start them again."""
        if self._loader is not None:
            self._loader.close()

    @property
    def epoch(self) -> int:
        """Epochs completed with the last batch handed out."""
        return self.loader.completed

    @property
    def is_main(self) -> bool:
        return self.world.is_main

    def batches(self, *, steps: int | None = None, epochs: int | None = None) -> Iterator[Batch]:
        """Yield this rank's part of each global batch, epoch after epoch; `steps` of them, or without end.

        `epochs` is the number of epochs of the whole run, including those before a resume: batches end when they are
        over. `batch.epoch` counts from 0.
        """
        yield from islice(self.loader.batches(epochs=epochs), steps)

    def step(self, batch: Any) -> StepResult:
        """Take one optimizer step: forward and backward over all micro-batches, normalise, clip, update.

        A batch from `batches()` is this rank's part. Anything else is a whole global batch, the same on every rank.
        """
        return self.trainer.step(batch)

    def forward_backward(self, batch: Any) -> None:
        """Run the first half of `step`, for loops that read gradients."""
        self.trainer.forward_backward(batch)

    def update(self) -> StepResult:
        """Run the second half of `step`."""
        return self.trainer.update()

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over batches; changes nothing."""
        return self.trainer.evaluate(batches)

    def measure(self, *, batches: int | None = None) -> dict[str, float]:
        """The loss and the metrics of `Job(evaluation=...)`, over each of its samples once; all ranks call it.

        `batches` stops after so many of them.
        """
        if self._evaluated is None:
            self._evaluated = EvaluationData(self.trainer, workers=self._workers)
        return self._evaluated.measure(batches)

    def state(self) -> dict[str, torch.Tensor]:
        """Every full parameter and buffer, on the CPU of every rank. All ranks must call it."""
        return {name: tensor.detach().cpu() for name, tensor in self.trainer.engine.state()}

    def save(self, path: str | Path) -> None:
        """Write a checkpoint to the folder `path`; any strategy on any number of ranks loads it. All ranks call it."""
        save_at(self.saver, self.data_position, Path(path))

    def load(self, path: str | Path) -> RunState:
        """Resume from a checkpoint, or from a run's latest one. All ranks call it, before `batches`."""
        loaded = load(self.trainer, find_checkpoint(Path(path)))
        self._position, self._loader = loaded.position, None
        return loaded

    @property
    def saver(self) -> Saver:
        """The object that saves this run. Its first use is collective: all ranks must take part."""
        if self._saver is None:
            self._saver = Saver(self.trainer)
        return self._saver

    def close(self) -> None:
        """Leave the process group. The end of a `with` block does so, too."""
        if self._saver is not None:
            self._saver.close()
        self.world.leave()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # otherwise peers may be stuck in a collective, and leaving would wait for them
            self.close()


def setup(
    job: Job,
    strategy: Strategy | str = "ddp",
    *,
    seed: int = 0,
    device: str | None = None,
    workers: int = 0,
    facts: ModelFacts | None = None,
    world: World | None = None,
    deepspeed_config: Mapping[str, Any] | None = None,
) -> Run:
    """Lay a job out under a strategy over the launched ranks, or in this process alone if no launcher started it.

    `deepspeed_config` is a DeepSpeed configuration for `engine=deepspeed`; it must agree with job and strategy.
    """
    chosen = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    facts = facts or describe(job)
    world = world or enter_world(device)
    resolved = check(job, facts, chosen, place_of(world, chosen))
    if resolved.traits.many_devices and world.ranks > 1:
        raise Refused(f"{resolved.data} runs in one process, but {world.ranks} were launched; use ddp, or launch one.")
    config = None
    if deepspeed_config is not None:
        config = check_engine_config(understood(deepspeed_config), job, resolved)
    trainer = Trainer(job, facts, resolved, world, seed=seed, engine_config=config)
    check_start(trainer)
    return Run(trainer, workers=workers)


def enter_world(device: str | None, patience: timedelta = PATIENCE, interface: str | None = None) -> World:
    """Join the ranks that torchrun, Slurm or Kubernetes launched; without a launcher, a world of one rank.

    Ranks communicate through `interface`; by default, through the one that leads to their meeting point.
    """
    kind = choose_device(device)
    place = launched()
    if place is None or place.ranks == 1:
        return alone(torch.device(kind, 0) if kind == "cuda" else torch.device(kind))
    announce(place)
    bind_launched(place, interface)
    if kind == "cuda":
        refuse_missing_gpus(place_for(kind, place.ranks, local_ranks=place.local_ranks))
    return join(
        rank=place.rank,
        ranks=place.ranks,
        local_rank=place.local_rank,
        local_ranks=place.local_ranks,
        device=torch.device(kind, place.local_rank) if kind == "cuda" else torch.device(kind),
        store=_store_after_restart(place, patience),
        patience=patience,
    )


def _store_after_restart(place: LaunchedRank, patience: timedelta) -> dist.Store | None:
    """A separate section of torchrun's store after a restart; None before one.

    The store outlives the ranks: a quick rank would find the addresses that its peers had before the restart, and wait
    for processes that are gone.
    """
    restarts = restart_count()
    if not restarts:
        return None
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.ranks, timeout=patience))
    store.set_timeout(patience)
    return dist.PrefixStore(f"restart-{restarts}", store)
