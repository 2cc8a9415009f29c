"""Load a checkpoint into a run of any strategy: check that it fits, verify every byte, and only then load."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from meshwright import errors
from meshwright.assemble.world import World
from meshwright.checkpoint.dcp_planner import PartsLoadPlanner
from meshwright.checkpoint.frozen import match_base
from meshwright.checkpoint.integrity import Damage, find_damage, find_gaps, raise_damage
from meshwright.checkpoint.job_match import group_of, match_run
from meshwright.checkpoint.json_state import decode
from meshwright.checkpoint.manifest import OPTIMIZER, RNG, Entry, Manifest, RunState, read_manifest
from meshwright.checkpoint.parts import State, add_parts, held_parts
from meshwright.checkpoint.state import ema_parts, model_state, set_rng
from meshwright.checkpoint.storage import MappedFiles, Reader
from meshwright.checkpoint.trained import Trained
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.strategies.cuts import Cut, Stretch

# Settings of how an optimizer computes, not what: these come from the current job.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}

T = TypeVar("T")


def load(trainer: Trained, folder: Path) -> RunState:
    """Load a checkpoint into a run. All ranks call it. Nothing changes if it does not fit or is damaged."""
    world = trainer.world
    manifest = agreed(world, lambda: read_manifest(folder))
    model = agreed(world, lambda: match_run(trainer, manifest, model_state(trainer)))
    if manifest.run_state.frozen is not None:
        match_base(trainer, manifest.run_state.frozen)
    agreed(world, lambda: raise_damage(folder, _damage_of_own_share(folder, manifest, world)))
    _load_state(trainer, manifest, model, Reader(manifest, MappedFiles(folder)))
    return manifest.run_state


def agreed(world: World, read: Callable[[], T]) -> T:
    """The result of `read`; if it raises on any rank, all ranks raise the first rank's error."""
    found: list[T] = []
    problem: tuple[str, str] | None = None
    try:
        found.append(read())
    except MeshwrightError as error:
        problem = type(error).__name__, str(error)
    except OSError as error:
        problem = CheckpointError.__name__, f"{error.filename or 'The checkpoint'} cannot be read: {error.strerror}."
    if problems := [one for one in world.gather(problem) if one is not None]:
        raise getattr(errors, problems[0][0])(problems[0][1])
    return found[0]


def _damage_of_own_share(folder: Path, manifest: Manifest, world: World) -> list[Damage]:
    """Each file is read by one rank; rank 0 also checks the manifest."""
    gaps = list(find_gaps(manifest)) if world.is_main else []
    return gaps + find_damage(folder, manifest, sorted(manifest.files)[world.rank :: world.ranks])


def _load_state(trainer: Trained, manifest: Manifest, model: State, reader: Reader) -> None:
    run_state = manifest.run_state
    optimizer_state = _Slots(trainer, manifest)
    generators = _generators(trainer, manifest)
    state = model | optimizer_state.state | {key: held_parts(tensor) for key, tensor in generators.items()}
    if trainer.ema is not None:
        trainer.ema.forget()
        if run_state.ema is not None:
            state |= ema_parts(trainer, trainer.ema.make_room())
    agreed(trainer.world, lambda: _read(state, reader))
    trainer.engine.loaded()
    if trainer.host is not None:
        trainer.host.take_parameters()
    if run_state.optimizer is not None and trainer.optimizer is not None:
        _load_optimizer(trainer, run_state.optimizer["groups"], optimizer_state)
    if trainer.schedule is not None and run_state.schedule is not None:
        trainer.schedule.load_state_dict(decode(run_state.schedule["state"]))
    if trainer.loss_scale is not None and run_state.loss_scale is not None:
        for key, value in run_state.loss_scale.items():
            setattr(trainer.loss_scale, key, value)
    if trainer.ema is not None and run_state.ema is not None:
        trainer.ema.updates = run_state.ema["updates"]
    trainer.loop.clear()
    trainer.loop.update(decode(run_state.loop) if run_state.loop is not None else {})
    for key, tensor in generators.items():
        set_rng(key.rpartition("/")[2], tensor, trainer.world.device)
    trainer.steps = run_state.step


def _read(state: State, reader: Reader) -> None:
    """Each rank plans and reads on its own: boxes need no communication."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, planner=PartsLoadPlanner(), no_dist=True)


class _Slots:
    """Memory to load the optimizer state of each parameter into."""

    def __init__(self, trainer: Trained, manifest: Manifest) -> None:
        self.state: State = {}
        self._values: dict[int, dict[str, torch.Tensor]] = {}
        self._there = trainer.remembered.state
        by_name: dict[str, list[str]] = {}
        for key in manifest.tensors:
            if key.startswith(OPTIMIZER):
                by_name.setdefault(key[len(OPTIMIZER) :].rpartition("/")[0], []).append(key)
        for name, parameter in trainer.optimized.named():
            cut = trainer.engine.cut_of(name)
            shape = held_parts(parameter, cut).shape
            for key in by_name.get(name, ()):
                self._add(key, manifest.tensors[key], parameter, cut, shape)

    def _add(
        self, key: str, entry: Entry, parameter: nn.Parameter, cut: Cut | Stretch | None, whole: tuple[int, ...]
    ) -> None:
        """`whole` is the unsharded parameter's shape, which the checkpoint uses."""
        slot = key.rpartition("/")[2]
        # For a parameter without dims, only the name distinguishes a counter from a moment, as in torch.optim.
        if entry.shape == whole and (entry.shape or (slot != "step" and ":" not in slot)):
            dtype = parameter.dtype if entry.torch_dtype.is_floating_point else entry.torch_dtype
            there = self._there.get(parameter, {}).get(slot)
            fits = torch.is_tensor(there) and there.shape == parameter.shape and there.dtype == dtype
            value = there if fits else torch.empty_like(parameter.detach(), dtype=dtype)
            add_parts(self.state, key, held_parts(value, cut))
        else:
            value = torch.empty(entry.shape, dtype=entry.torch_dtype)
            add_parts(self.state, key, held_parts(value))
        self._values.setdefault(id(parameter), {})[slot] = value

    def of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """State in the optimizer's own types: numbers are numbers again."""
        found: dict[str, Any] = {}
        for key, value in self._values.get(id(parameter), {}).items():
            name, _, kind = key.partition(":")
            found[name] = value.item() if kind else value
        return found


def _load_optimizer(trainer: Trained, saved: list[dict[str, Any]], slots: _Slots) -> None:
    """Use the optimizer's own `load_state_dict`, which puts every value on the right device."""
    optimizer = trainer.remembered
    document = optimizer.state_dict()
    names = {id(parameter): name for name, parameter in trainer.optimized.named()}
    for number, (group, packed) in enumerate(zip(optimizer.param_groups, document["param_groups"], strict=True)):
        own = [names[id(p)] for p in group["params"] if id(p) in names]
        values = decode(saved[group_of(own, number, saved)]["values"])
        packed.update({k: v for k, v in values.items() if k in packed and k not in _IMPLEMENTATION and k != "params"})
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    document["state"] = {i: state for i, p in enumerate(parameters) if (state := slots.of(p))}
    optimizer.load_state_dict(document)


def _generators(trainer: Trained, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Memory for this rank's RNG states; none if the number of ranks changed, since they drew differently."""
    if manifest.run_state.ranks != trainer.world.ranks:
        return {}
    own = f"{RNG}{trainer.world.rank}/"
    return {
        key: torch.empty(entry.shape, dtype=entry.torch_dtype)
        for key, entry in manifest.tensors.items()
        if key.startswith(own) and (trainer.world.device.type == "cuda" or not key.endswith("/cuda"))
    }
