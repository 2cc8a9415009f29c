"""The kinds of export: files of weights, and files that continue the training in another tool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from meshwright.checkpoint.export_contents import Content, all_names, of_hugging_face, of_trainer, one_file
from meshwright.checkpoint.formats import SAFETENSORS, TORCH, Format
from meshwright.checkpoint.manifest import Manifest, RunState
from meshwright.checkpoint.training_documents import TrainingDocuments
from meshwright.checkpoint.training_files import (
    write_accelerate,
    write_accelerate_fsdp,
    write_dcp_training,
    write_lightning,
    write_torch_training,
    write_trainer,
)
from meshwright.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of export: files of weights, files of the training, or both."""

    form: Format = SAFETENSORS
    content: Callable[[Manifest], Content] = lambda manifest: Content(items=[])
    training: Callable[[Path, TrainingDocuments], None] | None = None
    takes_prefix: bool = False
    note: str = ""
    """What to know about this kind."""


_STEPS_PER_PROCESS = "schedule: Accelerate steps it once per process, unless split_batches is set"
_TARGETS = {
    "safetensors": Target(content=lambda manifest: all_names(manifest, shared=False)),
    "torch": Target(form=TORCH, content=lambda manifest: all_names(manifest, shared=True)),
    "hf": Target(content=of_hugging_face),
    "dcp": Target(training=write_dcp_training, takes_prefix=True),
    "accelerate": Target(content=one_file, training=write_accelerate, note=_STEPS_PER_PROCESS),
    "accelerate-fsdp": Target(training=write_accelerate_fsdp, note=_STEPS_PER_PROCESS),
    "trainer": Target(content=of_trainer, training=write_trainer),
    "lightning": Target(training=write_lightning, takes_prefix=True, note="epoch: Lightning begins one at this step"),
}
_WITH_TRAINING = {"torch": Target(training=write_torch_training, takes_prefix=True)}


def target_of(to: str, *, training: bool, prefix: str, dtype: str | None) -> Target:
    target: Target = choose("--to", to, _TARGETS)
    if training and target.training is None:
        if to not in _WITH_TRAINING:
            kinds = [
                *(f"{kind} --training" for kind in _WITH_TRAINING),
                *(k for k, t in _TARGETS.items() if t.training),
            ]
            raise BadInput(f"--to {to} holds weights only; for the training choose one of {', '.join(kinds)}.")
        target = _WITH_TRAINING[to]
    if prefix and not target.takes_prefix:
        raise BadInput("--prefix is for dcp, lightning and torch --training, whose reader may wrap the model.")
    if dtype is not None and target.training is not None:
        raise BadInput("--dtype casts weights only, but this export continues the training; omit it.")
    return target


def notes_of(run_state: RunState, target: Target) -> Iterator[str]:
    """What the export does not hold, one line each."""
    if target.training is None:
        parts = {"optimizer": run_state.optimizer, "schedule": run_state.schedule, "loss scale": run_state.loss_scale}
        if lost := [name for name, part in parts.items() if part]:
            yield f"left out: {', '.join(lost)}, step {run_state.step}; `--to torch --training` writes them"
        return
    if run_state.optimizer is None:
        yield "optimizer: the checkpoint has none"
    yield f"left out: random generators, and the position in the data, which is sample {run_state.samples}"
    if target.note and (run_state.schedule or not target.note.startswith("schedule")):
        yield target.note


def choose(option: str, word: str, choices: Mapping[str, Any]) -> Any:
    if word in choices:
        return choices[word]
    near = get_close_matches(word, choices, n=1)
    advice = f"; did you mean {near[0]!r}?" if near else "."
    raise BadInput(f"{option} must be one of {', '.join(choices)}, not {word!r}{advice}")
