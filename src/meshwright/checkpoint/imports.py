"""Import a foreign checkpoint as the first of a run: weights, and with a job the training's state."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from meshwright.checkpoint.adapter_import import match_adapter
from meshwright.checkpoint.dcp_planner import PartsSavePlanner
from meshwright.checkpoint.folder import CHECKPOINTS, RunFolder, list_checkpoints, new_folder, reading
from meshwright.checkpoint.foreign.source import Source, open_source
from meshwright.checkpoint.hugging_face import hugging_face_of
from meshwright.checkpoint.manifest import MODEL, RunState
from meshwright.checkpoint.name_matching import ExpectedState, Match, Prefix, expected_by, match_to
from meshwright.checkpoint.optimizer_import import import_training
from meshwright.checkpoint.parts import State, held_parts
from meshwright.checkpoint.progress import Advance, Progress, silent
from meshwright.checkpoint.storage import NAMES, Writer
from meshwright.errors import BadInput, CheckpointError, OutputError

SEED = 0


def import_weights(
    path: Path,
    run: Path,
    *,
    job: str | None = None,
    weights_only: bool = False,
    step: int | None = None,
    schedule: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write a run's first checkpoint from a foreign file or folder; with a job, only if it fits it.

    With a job, the source's optimizer, schedule and step are imported too, unless only weights are wanted; otherwise
    the run starts at step 0. `step` and `schedule` are those of `import_training`.
    """
    with reading(run):
        _refuse_used(run)
    if step is not None and step < 0:
        raise BadInput(f"--step must not be negative, and is {step}.")
    expected = expected_by(job) if job is not None else None
    source = open_source(path)
    match, notes = _match(source, expected)
    imported = None
    if source.training is not None and source.training.groups and expected is not None and not weights_only:
        imported = import_training(source.training, match, expected, step=step, schedule=schedule)
    tensors = match.tensors | (imported.masters if imported else {})
    _refuse_unknown_dtypes(path, tensors)
    run_state = RunState(
        **(imported.run_state if imported else {"step": 0, "samples": 0, "strategy": "single", "ranks": 1}),
        seed=SEED,
        tied={} if expected is None else expected.tied,
        hugging_face=_hugging_face(source) if expected is None else hugging_face_of(expected.model, expected.names),
    )
    state: State = {MODEL + name: held_parts(tensor) for name, tensor in tensors.items()}
    target = _write(run, state | (imported.state if imported else {}), run_state, progress)
    return {
        **{"source": str(path), "path": str(target), "step": run_state.step, "optimizer": imported is not None},
        "schedule": run_state.schedule["class"] if run_state.schedule else None,
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()),
        "tied": dict(run_state.tied),
        "prefix": {"off": match.prefix.off, "on": match.prefix.on},
        "left_out": list(match.left_out),
        "notes": [*notes, *(imported.notes if imported else ()), *_left_out(source, imported is not None)],
    }


def _match(source: Source, expected: ExpectedState | None) -> tuple[Match, list[str]]:
    """The weights under the job's names, and what to tell about it."""
    if source.is_adapter:
        if expected is None:
            raise CheckpointError(
                f"{source.path} is a peft adapter without its base model; give the job that adapts it (--job)."
            )
        match, note = match_adapter(source, expected, seed=SEED)
        return match, [note]
    if expected is None:
        return Match(dict(source.tensors), Prefix(), ()), []
    match = match_to(source, expected)
    return match, [f"names: parts of wrappers removed: {', '.join(match.wrappers)}"] if match.wrappers else []


def _left_out(source: Source, with_optimizer: bool) -> list[str]:
    """What the source holds and the checkpoint does not, one line each."""
    found = source.training
    if found is None:
        return []
    lines = []
    if not with_optimizer:
        there = {"optimizer": found.groups, "schedule": found.schedule, "loss scale": found.loss_scale}
        parts = [name for name, part in there.items() if part] + ["step"] * (found.step is not None)
        why = "" if not parts else ", since only weights are imported; the run starts at step 0 with a new optimizer"
        lines += [f"left out: {', '.join(parts)}{why}"] if parts else []
    return lines + ([f"left out: {', '.join(found.left_out)}"] if found.left_out else [])


class _ProgressPlanner(PartsSavePlanner):
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


def _write(run: Path, state: State, run_state: RunState, progress: Progress) -> Path:
    """Write with the same writer as a run; tensors are copied from file to file, one after another."""
    total = sum(prod(held.shape) * held.dtype.itemsize for held in state.values())
    folder = RunFolder(run / CHECKPOINTS)
    temporary = folder.temporary(run_state.step)
    with new_folder(temporary, wanted=run), progress(f"writing {run.name}", total) as advance:
        planner = _ProgressPlanner(state, advance)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer = Writer(temporary, 0, run_state, folder.publish)
        writer.finish(metadata, [writer.write_data(plans[0], planner).wait()])
    return list_checkpoints(folder.folder)[-1]


def _refuse_used(run: Path) -> None:
    if run.exists() and not run.is_dir():
        raise OutputError(f"{run} is a file; give the folder of a new run.")
    if list_checkpoints(run / CHECKPOINTS):
        raise OutputError(f"{run} already has checkpoints; give the folder of a new run.")


def _refuse_unknown_dtypes(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{path} has {name} in {tensor.dtype}, which a checkpoint cannot store.")


def _hugging_face(source: Source) -> dict[str, Any] | None:
    return None if source.config is None else {"prefix": "", "config": dict(source.config)}
