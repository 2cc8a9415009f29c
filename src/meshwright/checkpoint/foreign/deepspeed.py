"""Read a checkpoint folder that DeepSpeed wrote: weights, fp32 masters and optimizer, joined from ZeRO's shards.

DeepSpeed need not be installed. Its files are pickles, of which only tensors and plain containers are loaded: an object
of DeepSpeed's own (an enum, an address) becomes an inert stand-in, and any other object is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.foreign.optimizer import read_optimizer
from meshwright.checkpoint.foreign.training import TrainingState
from meshwright.checkpoint.parts import HeldParts, add_parts, chunk, held_parts
from meshwright.describe.dtypes import LOW
from meshwright.errors import CheckpointError, one_line
from meshwright.facts.data_axis import word_of_stage
from meshwright.facts.strategy import Strategy
from meshwright.reading import read_text, refuse_special
from meshwright.strategies.cuts import Stretch

LATEST = "latest"
_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")


@dataclass(frozen=True)
class DeepSpeedFolder:
    tensors: dict[str, torch.Tensor]
    """Parameters (fp32 masters if there are any) and buffers."""
    training: TrainingState


def find_deepspeed(folder: Path) -> Path | None:
    """The folder of one step: this one, or the one that its `latest` names; None if DeepSpeed wrote neither."""
    if (folder / LATEST).is_file():
        tag = read_text(folder / LATEST, limit=4096).strip()
        folder = folder / tag if Path(tag).name == tag else folder
    return folder if _files(folder, _MODEL) else None


def open_deepspeed(folder: Path) -> DeepSpeedFolder:
    """Read one step that `save_checkpoint` wrote."""
    models, optimizers = _files(folder, _MODEL), _files(folder, _OPTIMIZER)
    parts = {part for part, _ in (*models, *optimizers)}
    if parts != {0} or any(folder.glob("layer_*")) or any(folder.glob("*expert*")):
        raise CheckpointError(
            f"{folder} holds a model split by tensor, pipeline or expert parallelism, which cannot be read; "
            "convert it to one file with DeepSpeed's zero_to_fp32.py and import that."
        )
    model = [_load(path) for path in models.values()]
    states = [_load(path)["optimizer_state_dict"] for path in optimizers.values()]
    _refuse_incomplete(folder, model[0], len(states))
    try:
        if not states:
            return _read_stage_0(model[0])
        if "fp32_flat_groups" in states[0]:
            return _read_stage_3(model, states)
        return _read_stage_1_or_2(model[0], states)
    except (KeyError, IndexError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{folder} does not have the layout of DeepSpeed 0.19: {one_line(error)}") from None


def _files(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, int], Path]:
    """Files of one kind, sorted by model part and rank."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            found[int(match["part"]), int(match["rank"] or 0)] = path
    return dict(sorted(found.items()))


class _StandIn:
    """Inert stand-in for an object of DeepSpeed's; it only keeps its constructor arguments."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def _load(path: Path) -> dict[str, Any]:
    refuse_special(path)
    try:
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if foreign := [name for name in classes if not name.startswith("deepspeed.")]:
            raise CheckpointError(f"{path} holds a {foreign[0]}, but only tensors, numbers and text can be read.")
        with torch.serialization.safe_globals([(_StandIn, name) for name in classes]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is not a valid torch file ({type(error).__name__}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a DeepSpeed file: it holds a {type(content).__name__}.")
    return content


def _refuse_incomplete(folder: Path, model: Mapping[str, Any], files: int) -> None:
    ranks = int(model.get("dp_world_size", 1))
    if files not in (0, ranks):
        raise CheckpointError(f"{folder} was written by {ranks} ranks, but has optimizer states of only {files}.")
    if files == 0 and model.get("param_shapes"):
        raise CheckpointError(f"{folder} has no optimizer states, where ZeRO keeps the weights.")


def _read_stage_0(model: Mapping[str, Any]) -> DeepSpeedFolder:
    """Stage 0: everything is unsharded in one file, and the optimizer numbers its parameters."""
    found = model.get("optimizer") or {}
    document = found.get("optimizer_state_dict", found)
    masters = [tensor for group in found.get("fp32_groups", ()) for tensor in group]
    optimizer = read_optimizer(document, "The folder's optimizer") if document else {}
    training = _training(model, stage=0, masters=masters, **optimizer)
    return DeepSpeedFolder(_parameters(model["module"]), training)


def _read_stage_1_or_2(model: Mapping[str, Any], states: list[dict[str, Any]]) -> DeepSpeedFolder:
    """Stages 1 and 2: each group is flattened and split evenly over the ranks; addresses locate each parameter."""
    if any(padding for group in states[0].get("param_alignment_paddings") or () for padding in group):
        raise CheckpointError("The folder was written with parameter_alignment, whose padding cannot be read.")
    shapes = [dict(group) for group in model["param_shapes"]]
    slots: dict[str, dict[str, HeldParts]] = {}
    pieces: dict[str, list[torch.Tensor]] = {}
    for number, group in enumerate(shapes):
        done = dict.fromkeys(group, 0)
        for state in states:
            flat = state["single_partition_of_fp32_groups"][number]
            for name, address in state["param_slice_mappings"][number].items():
                own = slice(address.start, address.start + address.numel)
                stretch = Stretch(shape=tuple(group[name]), start=done[name])
                pieces.setdefault(name, []).append(flat.narrow(0, address.start, address.numel))
                optimizer = state["base_optimizer_state"]["state"].get(number, {})
                _add(slots.setdefault(name, {}), optimizer, flat.numel(), own, stretch)
                done[name] += address.numel
    groups = [_values(group) for group in states[0]["base_optimizer_state"]["param_groups"]]
    names = [list(group) for group in shapes]
    masters = {name: torch.cat(pieces[name]).view(tuple(shape)) for group in shapes for name, shape in group.items()}
    tensors = _parameters(model["module"]) | masters | _tied(model, masters)
    stage, scale = _stage(states[0]), _loss_scale(states[0])
    training = _training(model, stage=stage, groups=groups, names=names, slots=slots, loss_scale=scale)
    return DeepSpeedFolder(tensors, training)


def _read_stage_3(models: list[dict[str, Any]], states: list[dict[str, Any]]) -> DeepSpeedFolder:
    """Stage 3: every parameter is split evenly, and the pieces follow each other in each rank's flat groups."""
    model = models[0]
    shapes = [dict(group) for group in model["param_shapes"]]
    slots: dict[str, dict[str, HeldParts]] = {}
    masters = {}
    flats = [_FlatReader(state["fp32_flat_groups"], state["optimizer_state_dict"]["state"]) for state in states]
    for name, shape in ((name, tuple(shape)) for group in shapes for name, shape in group.items()):
        size, pieces = -(-prod(shape) // len(states)), []
        for rank, flat in enumerate(flats):
            start, length = chunk(prod(shape), len(states), rank)
            number, at = flat.take(size)
            group, state = flat.groups[number], flat.states.get(number, {})
            pieces.append(group.narrow(0, at, length))
            own, stretch = slice(at, at + length), Stretch(shape=shape, start=start)
            _add(slots.setdefault(name, {}), state, group.numel(), own, stretch)
        masters[name] = torch.cat(pieces).view(shape)
    frozen = {
        name: torch.cat([part["frozen_param_fragments"][name] for part in models])[: prod(shape)].view(tuple(shape))
        for name, shape in (model.get("frozen_param_shapes") or {}).items()
    }
    buffers = {name: model["module"][name] for name in model["buffer_names"] if name in model["module"]}
    tensors = buffers | _parameters(frozen) | masters
    groups = [_values(group) for group in states[0]["optimizer_state_dict"]["param_groups"]]
    names = [list(group) for group in shapes]
    training = _training(model, stage=3, groups=groups, names=names, slots=slots, loss_scale=_loss_scale(states[0]))
    return DeepSpeedFolder(tensors | _tied(model, tensors), training)


class _FlatReader:
    """Reads one rank's flat groups from front to back."""

    def __init__(self, groups: list[torch.Tensor], states: dict[int, dict[str, Any]]) -> None:
        self.groups, self.states = groups, states
        self._number = self._at = 0

    def take(self, size: int) -> tuple[int, int]:
        """The group and offset of the next `size` elements."""
        if self._at + size > self.groups[self._number].numel():
            self._number, self._at = self._number + 1, 0
        self._at += size
        return self._number, self._at - size


def _add(slots: dict[str, HeldParts], state: Mapping[str, Any], whole: int, own: slice, stretch: Stretch) -> None:
    """Add a rank's piece of all optimizer state; a scalar counter is taken once."""
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() == 1 and value.numel() >= whole:
            add_parts(slots, key, held_parts(value[own], stretch))
        elif torch.is_tensor(value):
            slots.setdefault(key, held_parts(value))


def _parameters(module: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters in fp32, as masters are. Empty tensors are stored elsewhere."""
    return {n: t.float() if t.dtype in LOW else t for n, t in module.items() if torch.is_tensor(t) and t.numel()}


def _tied(model: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shared = dict(model.get("shared_params") or {})
    return {alias: tensors[first] for alias, first in shared.items() if first in tensors}


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _stage(state: Mapping[str, Any]) -> int:
    """The ZeRO stage; DeepSpeed's bf16 optimizer does not record it, and is stage 1."""
    found = state.get("zero_stage")
    return int(found.arguments[0]) if isinstance(found, _StandIn) and found.arguments else 1


def _loss_scale(state: Mapping[str, Any]) -> dict[str, float] | None:
    """The fp16 loss scale, under our field names."""
    scaler = vars(state["loss_scaler"]) if isinstance(state.get("loss_scaler"), _StandIn) else {}
    if not state.get("dynamic_loss_scale") or "cur_scale" not in scaler:
        return None
    interval, since = int(scaler["scale_window"]), int(scaler["cur_iter"]) - int(scaler["last_overflow_iter"]) - 1
    return {
        "value": float(scaler["cur_scale"]),
        "growth": float(scaler["scale_factor"]),
        "interval": interval,
        "steps_since": max(0, since) % interval,
    }


def _training(model: Mapping[str, Any], *, stage: int, **rest: Any) -> TrainingState:
    ranks = int(model.get("dp_world_size", 1))
    return TrainingState(
        step=int(model.get("global_steps", 0)),
        samples=int(model.get("global_samples", 0)),
        ranks=ranks,
        strategy=str(Strategy(data=word_of_stage(stage), data_size=ranks, engine="deepspeed")),
        schedule=model.get("lr_scheduler"),
        **rest,
    )
