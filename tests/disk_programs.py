"""What a run does where a disk is full or a folder cannot be written: it says so, and goes on.

python tests/disk_programs.py FOLDER    with a small file system at FOLDER, by tests/checkpoint/test_disk_full.py
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from checkpoint_programs import Setup, make_run, take_steps
from meshwright.assemble.world import World, alone
from meshwright.checkpoint.folder import RunFolder, find_checkpoint
from meshwright.checkpoint.integrity import inspect
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.save import Saver
from meshwright.errors import OutputError
from meshwright.runtime.run import Run

LEFT = 20_000
"""Bytes on a disk that is nearly full: less than what a rank writes."""
Full = Callable[[], AbstractContextManager[None]]
"""While it is entered, there is no space."""


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def filled(folder: Path, left: int, *, by_us: bool) -> Iterator[None]:
    """A file system with so many bytes left; only one rank fills it."""
    filler = folder / "filler"
    if by_us:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        filler.write_bytes(bytes(max(0, free - left)))
    yield
    if by_us:
        filler.unlink()


def limited(world: World, context: Setup, folder: str, limits: list[int | None], background: bool) -> list[str]:
    """The ranks' files cannot grow beyond their limits. What saving said, twice: at a place, and in a run's folder."""
    limit = limits[world.rank]
    return survive(
        world, context, Path(folder), lambda: nullcontext() if limit is None else files_up_to(limit), background
    )


def on_small_disk(world: World, context: Setup, folder: str, left: int, background: bool) -> list[str]:
    """The same where a file system is full."""
    place = Path(folder)
    return survive(world, context, place, lambda: filled(place, left, by_us=world.is_main), background)


def try_to_save(world: World, context: Setup, target: str) -> str:
    """What was said."""
    run = make_run(world, context)
    with pytest.raises(OutputError) as caught:
        run.save(target)
    take_steps(run, 1)
    return str(caught.value)


def survive(world: World, context: Setup, folder: Path, full: Full, background: bool) -> list[str]:
    """Save, fail to save, look whether all is as it was, train on, save again."""
    run = make_run(world, context)
    kept = RunFolder(folder / "run" / "checkpoints")
    take_steps(run, 1)
    run.save(folder / "first")
    _save(run, kept, background)
    said = [
        _fail(run, full, lambda: run.save(folder / "second")),
        _fail(run, full, lambda: _save(run, kept, background)),
    ]
    _see(world, folder, saved=["first"], steps=[1])
    take_steps(run, 1)
    state = run.state()
    run.save(folder / "second")
    _save(run, kept, background)
    _see(world, folder, saved=["first", "second"], steps=[1, 2])
    for path, step in ((folder / "first", 1), (folder / "run", 2), (folder / "second", 2)):
        assert run.load(path).step == step
    assert all(torch.equal(tensor, state[name]) for name, tensor in run.state().items())
    take_steps(run, 1)
    world.gather(None)
    return said


def save_in(saver: Saver, samples: int, step: int, folder: RunFolder, *, background: bool) -> None:
    """Save as the newest checkpoint of a run."""
    saver.save(samples, folder.temporary(step), folder.publish, background=background)


def _save(run: Run, folder: RunFolder, background: bool) -> None:
    save_in(run.saver, run.data_position, run.trainer.steps, folder, background=background)
    run.saver.wait()


def _fail(run: Run, full: Full, save: Callable[[], None]) -> str:
    """What a save says that fails; the run's state is not touched."""
    before = {name: tensor.clone() for name, tensor in run.state().items()}
    run.world.gather(None)
    with full():
        run.world.gather(None)  # not before everybody's disk is full
        with pytest.raises(OutputError) as caught:
            save()
        run.world.gather(None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.state().items())
    return str(caught.value)


def _see(world: World, folder: Path, *, saved: list[str], steps: list[int]) -> None:
    """These checkpoints are there and sound, and nothing else: no part of another."""
    world.gather(None)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*saved, "run"])
    names = [f"step-{step:08d}" for step in steps]
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == ["latest", *names]
    assert find_checkpoint(folder / "run").name == names[-1]
    for path in (*(folder / name for name in saved), *(folder / "run" / "checkpoints" / name for name in names)):
        assert inspect(path, read_manifest(path)) == []
    world.gather(None)


def main(folder: str) -> None:
    """On one rank in this process and on two; prints what was said."""
    from checkpoint_jobs import facts_of
    from rank_pool import RankPool

    pool = RankPool(2)
    for background in (False, True):
        for strategy in ("single", "fsdp"):
            place = Path(folder, f"{strategy}-{background}")
            place.mkdir()
            context = Setup("transformer", facts_of("transformer"), strategy)
            if strategy == "single":
                said = [on_small_disk(alone(torch.device("cpu")), context, str(place), LEFT, background)]
            else:
                said = pool(on_small_disk, context, str(place), LEFT, background)
            print(*(line for rank in said for line in rank), sep="\n")
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1])
