"""Check that a checkpoint belongs to a job: same parameters, buffers and shapes, same optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.distributed.tensor import DTensor

from meshwright.checkpoint.manifest import EMA, MODEL, OPTIMIZER, Manifest
from meshwright.checkpoint.parts import State, add_parts
from meshwright.checkpoint.trained import Trained
from meshwright.errors import WrongCheckpoint


def match_run(trainer: Trained, manifest: Manifest, own: State) -> State:
    """Check that a checkpoint fits a run; return `own`, this rank's parameters and buffers, under its names."""
    shapes = {MODEL + p.name: p.shape for p in trainer.facts.parameters}
    shapes |= {name: held.shape for name, held in own.items() if name not in shapes}
    aliases = {MODEL + alias: MODEL + p.name for p in trainer.facts.parameters for alias in p.names[1:]}
    sources = match_names(shapes, manifest, aliases)
    if manifest.run_state.optimizer is not None and trainer.optimizer is not None:
        _match_optimizer(trainer, manifest)
        _match_schedule(trainer, manifest)
    if manifest.run_state.ema is not None and trainer.ema is not None:
        _match_averages(trainer, manifest)
    state: State = {}
    for name, held in own.items():
        if name in sources:
            add_parts(state, sources[name], held)
    return state


def _match_averages(trainer: Trained, manifest: Manifest) -> None:
    shapes = {p.name: tuple(p.shape) for p in trainer.facts.parameters}
    for name, _ in trainer.optimized.named():
        entry = manifest.tensors.get(EMA + name)
        if entry is None or entry.shape != shapes[name]:
            found = "lacks" if entry is None else f"has, with shape {entry.shape},"
            raise WrongCheckpoint(
                f"The checkpoint {found} the averaged {name}; to begin a new average, export and import its weights."
            )


def match_names(
    shapes: dict[str, tuple[int, ...]], manifest: Manifest, aliases: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The checkpoint's name for each tensor of the model that it stores; the error names the first that does not fit.

    `aliases` maps further names of the model's tied parameters to the first name.
    """
    tied = {MODEL + alias: MODEL + first for alias, first in manifest.run_state.tied.items()}
    left_out = {MODEL + name for name in manifest.run_state.frozen or ()}
    stored = [name for name in shapes if tied.get(name, name) not in left_out]
    sources = {name: name if name in manifest.tensors else tied.get(name, name) for name in stored}
    for name, source in sources.items():
        shown = name.removeprefix(MODEL)
        if source not in manifest.tensors:
            raise WrongCheckpoint(f"The checkpoint lacks {shown}, which the job's model has; {_advice(manifest)}")
        found, expected = manifest.tensors[source].shape, tuple(shapes[name])
        if found != expected:
            raise WrongCheckpoint(
                f"{shown} has shape {found} in the checkpoint and {expected} in the job's model; {_advice(manifest)}"
            )
    extra = [name for name in manifest.tensors if name.startswith(MODEL) and name not in set(sources.values())]
    if extra:
        shown = extra[0].removeprefix(MODEL)
        if extra[0] in aliases:
            first = aliases[extra[0]].removeprefix(MODEL)
            raise WrongCheckpoint(
                f"The checkpoint stores {shown} and {first} separately, but in the job's model they are one parameter; "
                "`checkpoint import --job` merges them."
            )
        raise WrongCheckpoint(f"The checkpoint has {shown}, but the job's model does not; {_advice(manifest)}")
    return sources


def _match_optimizer(trainer: Trained, manifest: Manifest) -> None:
    saved: Any = manifest.run_state.optimizer
    own, found = type(trainer.optimizer).__name__, saved["class"]
    if own != found:
        raise WrongCheckpoint(f"The checkpoint's optimizer is {found}, but the job's is {own}.")
    groups = trainer.remembered.param_groups
    if len(saved["groups"]) != len(groups):
        raise WrongCheckpoint(
            f"The checkpoint's optimizer has {len(saved['groups'])} parameter groups, the job's {len(groups)}."
        )
    names = {id(parameter): name for name, parameter in trainer.optimized.named()}
    for number, group in enumerate(groups):
        group_of([names[id(p)] for p in group["params"] if id(p) in names], number, saved["groups"])
    _refuse_unshardable_state(trainer, manifest)


def _match_schedule(trainer: Trained, manifest: Manifest) -> None:
    saved = manifest.run_state.schedule
    found = saved["class"] if saved else "no schedule"
    own = type(trainer.schedule).__name__ if trainer.schedule is not None else "no schedule"
    if own != found:
        raise WrongCheckpoint(
            f"The checkpoint has {found}, but the job has {own}; to start another schedule with these "
            "weights, export and import them."
        )


def group_of(own: list[str], number: int, saved: list[dict[str, Any]]) -> int:
    """The saved group that holds these parameters."""
    found = {index for index, group in enumerate(saved) for name in own if name in set(group["names"])}
    if len(found) > 1:
        raise WrongCheckpoint(f"Group {number} of the optimizer mixes parameters of several groups of the checkpoint.")
    return found.pop() if found else number


def _refuse_unshardable_state(trainer: Trained, manifest: Manifest) -> None:
    """Refuse optimizer state that has another shape than its sharded parameter: it cannot be sharded the same way."""
    shapes = {p.name: p.shape for p in trainer.facts.parameters}
    divided = {
        name
        for name, parameter in trainer.optimized.named()
        if trainer.engine.cut_of(name) is not None
        or (isinstance(parameter.data, DTensor) and any(p.is_shard() for p in parameter.data.placements))
    }
    for key, entry in manifest.tensors.items():
        if not key.startswith(OPTIMIZER):
            continue
        name, _, slot = key[len(OPTIMIZER) :].rpartition("/")
        if name in divided and entry.shape != tuple(shapes[name]) and entry.shape not in ((), (1,)):
            raise WrongCheckpoint(
                f"The optimizer's {slot} of {name} has shape {entry.shape}, but the parameter has shape "
                f"{tuple(shapes[name])}, so {trainer.strategy} cannot shard it like the parameter; "
                "load it under a strategy with unsharded parameters (single, ddp)."
            )


def _advice(manifest: Manifest) -> str:
    return f"was it made by another job (step {manifest.run_state.step}, {manifest.run_state.strategy})?"
