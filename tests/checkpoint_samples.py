"""Checkpoints for tests, made in this process alone: of a tiny job, or of any tensors in any boxes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tiny_jobs
from meshwright.checkpoint.dcp_planner import PartsSavePlanner
from meshwright.checkpoint.manifest import RunState
from meshwright.checkpoint.parts import HeldParts, Part
from meshwright.checkpoint.storage import Writer
from meshwright.checkpoint.whole_tensors import WholeTensors
from meshwright.runtime.run import Run, setup

TINY_JOBS = tiny_jobs.__file__


def train_a_little(name: str) -> Run:
    """One step of a tiny job in one process."""
    job = getattr(tiny_jobs, name)
    run = setup(job, "single", device="cpu")
    torch.manual_seed(0)
    run.step(job.sample(8))
    return run


def save_in_boxes(folder: Path, tensors: Mapping[str, torch.Tensor], boxes: int = 2, **run_state: Any) -> Path:
    """A checkpoint whose tensors are each cut along their first dim, as ranks would have done."""
    state = {name: HeldParts(tuple(t.shape), t.dtype, tuple(_boxes(t, boxes))) for name, t in tensors.items()}
    planner = PartsSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    kept = {"step": 1, "samples": 8, "seed": 0, "strategy": "fsdp=2", "ranks": 2, **run_state}
    folder.mkdir(parents=True)
    writer = Writer(folder, 0, RunState(**kept), lambda done: None)
    writer.finish(metadata, [writer.write_data(plans[0], planner).wait()])
    return folder


def _boxes(tensor: torch.Tensor, count: int) -> Iterator[Part]:
    if tensor.numel() < 2:
        yield Part((0,) * tensor.dim(), tensor)
        return
    at = 0
    for box in tensor.chunk(count):
        yield Part((at, *[0] * (tensor.dim() - 1)), box)
        at += len(box)


def model_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint, by name."""
    whole = WholeTensors(checkpoint)
    return {key.removeprefix("model/"): whole.read(key) for key in whole.manifest.tensors if key.startswith("model/")}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """The same names, and under each the same dtype, shape and bits."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: what a full disk does to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def peak_memory_of(works: list[str], folder: Path) -> list[int]:
    """The most memory that each piece of work took while it told of its progress, mapped files aside.

    In a new process: this one's allocator keeps what was freed, and would use it again unseen.
    """
    script = f"""
from pathlib import Path
from checkpoint_samples import MemoryWatch
from meshwright.checkpoint.exports import export
from meshwright.checkpoint.imports import import_weights
for work in {works!r}:
    watch = MemoryWatch()
    exec(work)
    assert watch.told
    print(watch.peak)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [int(peak) for peak in done.stdout.split()]


class MemoryWatch:
    """A progress that notes the most memory of its own that the process had whenever it was told something."""

    def __init__(self) -> None:
        self._before = _own_memory()
        self.told = self.peak = 0

    @contextmanager
    def __call__(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        yield self._note

    def _note(self, size: int) -> None:
        self.told += size
        self.peak = max(self.peak, _own_memory() - self._before)


def _own_memory() -> int:
    """Bytes that are in no file; pages of mapped files can be dropped at any time."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


def everything_below(folder: Path) -> list[str]:
    return sorted(os.path.relpath(path, folder) for path in folder.rglob("*"))
