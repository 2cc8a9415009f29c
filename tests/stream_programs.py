"""What tests of streams run on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import stream_jobs
from meshwright.assemble.world import World
from meshwright.errors import JobError
from meshwright.runtime.run import Run
from rank_programs import trainer
from stream_jobs import Counted, DividedByGroup, DividedByVariable, Failing, Shuffled, make, padded

DATA: dict[str, Any] = {
    "shuffled": Shuffled,
    "counted": Counted,
    "by variable": DividedByVariable,
    "by group": DividedByGroup,
    "failing": Failing,
    "failing on one rank": lambda: Failing(rank=1),
    "sampler": lambda: DataLoader(
        [stream_jobs.sequence(index) for index in range(stream_jobs.SAMPLES)],  # type: ignore[arg-type]
        batch_size=6,
        shuffle=True,
        collate_fn=padded,
    ),
}
JOBS = {name: make(data) for name, data in DATA.items()}


def seen(world: World, data: str, strategy: str, options: dict[str, Any]) -> list[tuple[list[int], float]]:
    """The samples of each global batch, put together from all ranks, and the loss of each step.

    `steps` or `epochs` of them; `load` and `save` name a checkpoint.
    """
    run = Run(trainer(world, JOBS[data], strategy))
    if "load" in options:
        run.load(Path(options["load"]))
    found = []
    for batch in run.batches(steps=options.get("steps"), epochs=options.get("epochs")):
        own = [
            (piece.span.first + offset, int(index))
            for piece in batch.pieces
            if piece.span.length
            for offset, index in enumerate(piece.data["index"])
        ]
        everyone = dict(pair for pairs in world.gather(own) for pair in pairs)
        assert sorted(everyone) == list(range(batch.samples)), "every sample of the batch is on some rank"
        found.append(([everyone[place] for place in sorted(everyone)], run.step(batch).loss))
    if "save" in options:
        run.save(Path(options["save"]))
    return found


def refusal(world: World, data: str) -> str:
    """Why the data are refused; empty if they are not."""
    try:
        seen(world, data, "ddp", {"epochs": 1})
    except JobError as error:
        return str(error)
    return ""
