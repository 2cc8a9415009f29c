"""Open the loader of a run, and tell the user what sharing and resuming these data cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from meshwright.assemble.step import Trainer
from meshwright.checkpoint.load import agreed
from meshwright.describe.data_source import DataSource
from meshwright.facts.job import Job
from meshwright.facts.position import DataPosition
from meshwright.runtime.agreement import Agreement
from meshwright.runtime.data import Loader
from meshwright.runtime.order import Order
from meshwright.runtime.stream_state import StreamTrial, try_stream
from meshwright.runtime.user_order import UserOrder


def open_loader(trainer: Trainer, *, workers: int, position: DataPosition) -> Loader:
    """The loader of a run that continues at `position`. All ranks must call it."""
    job, world, source = trainer.job, trainer.world, trainer.cutter.opened

    def say(words: str) -> None:
        if world.is_main:
            print(words, file=sys.stderr, flush=True)

    by_state = False
    if source.is_stream:
        # One rank tries the stream's state for all: what they do must not differ.
        trial = agreed(world, lambda: try_stream(source, trainer.seed) if world.is_main else None)
        (trial, *_) = world.gather(trial)
        assert trial is not None
        by_state = not trial.no_state
        _tell_costs(say, trial, ranks=world.ranks, position=position)
        if position.state is not None and not by_state:
            position = replace(position, state=None)
    user = user_order(source, job, trainer.seed)
    return Loader(
        job,
        Order(
            samples=samples_of(source, user),
            global_batch=job.global_batch,
            seed=trainer.seed,
            share=trainer.share,
            drop_ragged=bool(trainer.facts.batch_norms),
            drop_last=source.drop_last,
            user=user,
        ),
        device=world.device,
        cutter=trainer.cutter,
        weighed=trainer.facts.weight_per_sample is not None,
        workers=workers,
        position=position,
        # Our own permutation follows from the seed; what the user's objects give is compared.
        agreement=Agreement(world) if source.is_stream or user is not None else None,
        by_state=by_state,
        say=say,
    )


def user_order(source: DataSource, job: Job, seed: int) -> UserOrder | None:
    """The order of the user's DataLoader, if there is one."""
    if source.loader is None or source.is_stream:
        return None
    return UserOrder(source, seed=seed, chunk=1 if source.holds_batches else job.global_batch)


def samples_of(source: DataSource, user: UserOrder | None) -> int | None:
    """Samples of an epoch, if known."""
    if source.is_stream or (user is not None and user.gives_batches):
        return None
    return len(source.dataset) if user is None else user.length


def _tell_costs(say: Callable[[str], None], trial: StreamTrial, *, ranks: int, position: DataPosition) -> None:
    if ranks > 1:
        say(
            f"note: Job(data=...) is a stream, so each of the {ranks} ranks reads all of it and collates its own "
            "samples; put expensive work into Job(collate=...)."
        )
    if not trial.no_state:
        return
    if not trial.repeats:
        say(
            "note: a resumed run cannot continue exactly: this stream gives other samples each time it is read, even "
            "if the generators of PyTorch, Python and numpy start from the same seed. Let it draw from those, or give "
            "it state_dict() and load_state_dict()."
        )
        return
    say(
        f"note: {trial.no_state}. A resumed run therefore reads its epoch again from the start and passes over the "
        "samples that it has seen; they are checked to be the same."
    )
    if position.within:
        say(f"note: passing over {position.within:,} samples to resume.")
