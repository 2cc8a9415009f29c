"""Import foreign weights as the first checkpoint of a run; from DeepSpeed folders, also the training state."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from meshwright.checkpoint.aside import new_folder, reading
from meshwright.checkpoint.carried import carry
from meshwright.checkpoint.expected import expected_by
from meshwright.checkpoint.folder import CHECKPOINTS, RunFolder, list_checkpoints
from meshwright.checkpoint.hugging_face import hugging_face_of
from meshwright.checkpoint.manifest import MODEL, Little
from meshwright.checkpoint.naming import Match, Prefix, match_to
from meshwright.checkpoint.parts import lay
from meshwright.checkpoint.planner import PartsSavePlanner, State
from meshwright.checkpoint.progress import Advance, Progress, silent
from meshwright.checkpoint.sources import Source, open_source
from meshwright.checkpoint.storage import NAMES, Writer
from meshwright.errors import CheckpointError, OutputError


def import_weights(path: Path, run: Path, *, job: str | None = None, progress: Progress = silent) -> dict[str, Any]:
    """Write a run's first checkpoint from a file or folder of weights; with a job, only if they fit it.

    It gets step 0, except for a DeepSpeed folder with a job, whose optimizer and step are imported.
    """
    with reading(run):
        _refuse_used(run)
    expected = expected_by(job) if job is not None else None
    source = open_source(path)
    match = Match(dict(source.tensors), Prefix(), ()) if expected is None else match_to(source, expected)
    carried = None
    if source.training is not None and expected is not None and source.training.groups:
        carried = carry(source.training, match, expected)
    tensors = match.tensors | (carried.masters if carried else {})
    _refuse_strange(path, tensors)
    little = Little(
        **(carried.little if carried else {"step": 0, "samples": 0, "strategy": "single", "ranks": 1}),
        seed=0,
        tied={} if expected is None else expected.tied,
        hugging_face=_of_folder(source) if expected is None else hugging_face_of(expected.model, expected.names),
    )
    state: State = {MODEL + name: lay(tensor) for name, tensor in tensors.items()}
    target = _write(run, state | (carried.state if carried else {}), little, progress)
    return {
        **{"source": str(path), "path": str(target), "step": little.step, "optimizer": carried is not None},
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()),
        "tied": dict(little.tied),
        "prefix": {"off": match.prefix.off, "on": match.prefix.on},
        "left_out": list(match.left_out),
    }


class _TellingPlanner(PartsSavePlanner):
    """Reports progress as tensors are requested for writing."""

    def __init__(self, state: State, advance: Advance) -> None:
        super().__init__()
        self.set_up_planner(state, is_coordinator=True)
        self._advance = advance

    def resolve_data(self, write_item: WriteItem) -> Any:
        tensor = super().resolve_data(write_item)
        assert isinstance(tensor, torch.Tensor)
        self._advance(tensor.numel() * tensor.itemsize)
        return tensor


def _write(run: Path, state: State, little: Little, progress: Progress) -> Path:
    """Write with the same writer as a run; tensors are copied from file to file, one after another."""
    total = sum(prod(laid.shape) * laid.dtype.itemsize for laid in state.values())
    folder = RunFolder(run / CHECKPOINTS)
    aside = folder.aside(little.step)
    with new_folder(aside, wanted=run), progress(f"writing {run.name}", total) as advance:
        planner = _TellingPlanner(state, advance)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer = Writer(aside, 0, little, folder.publish)
        writer.finish(metadata, [writer.write_data(plans[0], planner).wait()])
    return list_checkpoints(folder.folder)[-1]


def _refuse_used(run: Path) -> None:
    if run.exists() and not run.is_dir():
        raise OutputError(f"{run} is a file; give the folder of a new run.")
    if list_checkpoints(run / CHECKPOINTS):
        raise OutputError(f"{run} already has checkpoints; give the folder of a new run.")


def _refuse_strange(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{path} has {name} in {tensor.dtype}, which a checkpoint cannot store.")


def _of_folder(source: Source) -> dict[str, Any] | None:
    return None if source.config is None else {"prefix": "", "config": dict(source.config)}
