"""A run's state as boxes and small values: what is written, independent of the strategy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.assemble.rank_engine import RankEngine
from meshwright.checkpoint.hugging_face import hugging_face_of
from meshwright.checkpoint.json_state import encode, encode_optimizer
from meshwright.checkpoint.manifest import EMA, MODEL, OPTIMIZER, RNG, RunState
from meshwright.checkpoint.parts import State, add_parts, held_parts
from meshwright.checkpoint.trained import Trained
from meshwright.errors import CheckpointError
from meshwright.facts.position import DataPosition
from meshwright.strategies.cuts import Cut, Stretch

GroupNames = list[list[str]]
"""For each optimizer group, the names of its parameters on all pipeline stages."""


@dataclass(frozen=True)
class Snapshot:
    """Everything to write: this rank's boxes, and what is the same on all ranks."""

    state: State
    run_state: RunState


def snapshot(trainer: Trained, position: DataPosition, groups: GroupNames) -> Snapshot:
    """The state between two steps. Tensors are not copied, so it is valid only until the next step."""
    left_out = {MODEL + name for name in trainer.base or ()}
    model = {name: held for name, held in model_state(trainer, current_only=True).items() if name not in left_out}
    state = model | _optimizer_state(trainer) | rng_state(trainer)
    if trainer.ema is not None:
        state |= ema_parts(trainer, trainer.ema.named())
    return Snapshot(state, _run_state(trainer, position, groups))


def model_state(trainer: Trained, *, current_only: bool = False) -> State:
    """Every parameter under its first name, and every persistent buffer."""
    first = {name: p.name for p in trainer.facts.parameters for name in p.names}
    state: State = {}
    for held in trainer.engine.held():
        if first.get(held.name, held.name) == held.name and (held.current or not current_only):
            add_parts(state, MODEL + held.name, held_parts(held.tensor, held.cut))
    return state


def group_names(trainer: Trained) -> GroupNames:
    """Collective: a pipeline rank knows only the parameters of its own stages."""
    names = {id(parameter): name for name, parameter in trainer.optimized.named()}
    own = [[names[id(p)] for p in group["params"] if id(p) in names] for group in trainer.remembered.param_groups]
    everyone = trainer.world.gather(own)
    place = {p.name: at for at, p in enumerate(trainer.facts.parameters)}
    return [merged(ranks, place) for ranks in zip(*everyone, strict=True)]


def merged(ranks: tuple[list[str], ...], place: dict[str, int]) -> list[str]:
    """All ranks' names in the optimizer's order; stages hold parts of it, which the model's order joins."""
    if all(own == ranks[0] for own in ranks):
        return ranks[0]
    return sorted({name for own in ranks for name in own}, key=lambda name: place.get(name, len(place)))


def rng_state(trainer: Trained) -> State:
    """This rank's RNG states: torch on host and device, Python and numpy."""
    tensors = {"torch": torch.get_rng_state(), "python": _python_generator(), "numpy": _numpy_generator()}
    if trainer.world.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(trainer.world.device)
    return {f"{RNG}{trainer.world.rank}/{kind}": held_parts(tensor) for kind, tensor in tensors.items()}


def set_rng(kind: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Restore an RNG from `rng_state`."""
    if kind == "torch":
        torch.set_rng_state(tensor)
    elif kind == "cuda":
        torch.cuda.set_rng_state(tensor, device)
    elif kind == "python":
        *words, has_gauss, gauss = tensor.tolist()
        random.setstate((3, tuple(int(word) for word in words), gauss if has_gauss else None))
    else:
        *words, position, has_gauss, gauss = tensor.tolist()
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), int(position), int(has_gauss), gauss))


def _optimizer_state(trainer: Trained) -> State:
    state: State = {}
    for name, parameter in trainer.optimized.named():
        for key, value in trainer.remembered.state.get(parameter, {}).items():
            for suffix, tensor, cut in _boxed(name, key, value, parameter, trainer.engine.cut_of(name)):
                add_parts(state, f"{OPTIMIZER}{name}/{key}{suffix}", held_parts(tensor, cut))
    return state


def ema_parts(trainer: Trained, averages: list[tuple[str, torch.Tensor]]) -> State:
    """The boxes of averaged weights, which lie like the masters."""
    state: State = {}
    for name, average in averages:
        add_parts(state, EMA + name, held_parts(average, trainer.engine.cut_of(name)))
    return state


def _boxed(
    name: str, key: str, value: Any, parameter: nn.Parameter, cut: Cut | Stretch | None
) -> Iterator[tuple[str, torch.Tensor, Cut | Stretch | None]]:
    """Optimizer state of a parameter as a tensor in global coordinates; plain numbers get a suffix."""
    if value is None:
        return
    if isinstance(value, bool | int | float):
        yield f":{type(value).__name__}", torch.tensor(value, dtype=NUMBERS[type(value).__name__]), None
    elif not torch.is_tensor(value):
        raise CheckpointError(f"The optimizer's {key} of {name} is a {type(value).__name__}, not a tensor.")
    elif value.shape == parameter.shape:
        yield "", value, cut
    elif _needs_no_cut(value, parameter, cut):
        yield "", value, None
    else:
        raise CheckpointError(
            f"The optimizer's {key} of {name} has shape {tuple(value.shape)}, but the parameter has shape "
            f"{tuple(parameter.shape)}; state of a sharded parameter can be saved only if it has the parameter's shape."
        )


def _needs_no_cut(value: torch.Tensor, parameter: nn.Parameter, cut: Cut | Stretch | None) -> bool:
    """Whether state of another shape than its parameter's is unsharded, or is a DTensor that knows its sharding."""
    if value.numel() == 1 and not isinstance(value, DTensor):
        return True
    return cut is None and isinstance(value, DTensor) == isinstance(parameter.data, DTensor)


NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def _run_state(trainer: Trained, position: DataPosition, groups: GroupNames) -> RunState:
    optimizer, schedule = trainer.optimizer, trainer.schedule
    values = [{k: v for k, v in group.items() if k != "params"} for group in trainer.remembered.param_groups]
    return RunState(
        step=trainer.steps,
        samples=position.samples,
        data=_data_of(position),
        seed=trainer.seed,
        strategy=str(trainer.strategy),
        ranks=trainer.world.ranks,
        tied={alias: p.name for p in trainer.facts.parameters for alias in p.names[1:]},
        hugging_face=hugging_face_of(_one_model(trainer), [name for p in trainer.facts.parameters for name in p.names]),
        optimizer=None if optimizer is None else encode_optimizer(optimizer, groups, values),
        schedule=None
        if schedule is None
        else {"class": type(schedule).__name__, "state": encode(schedule.state_dict(), "The schedule")},
        loss_scale=asdict(trainer.loss_scale) if trainer.loss_scale else None,
        ema={"decay": trainer.ema.decay, "updates": trainer.ema.updates}
        if trainer.ema is not None and trainer.ema.updates
        else None,
        loop=encode(trainer.loop, "The training loop") if trainer.loop else None,
        frozen=trainer.base,
    )


def _data_of(position: DataPosition) -> dict[str, Any] | None:
    if position.epoch is None:
        return None
    state = None if position.state is None else encode(position.state, "The dataset's state_dict()")
    return {"epoch": position.epoch, "within": position.within, "digest": position.digest, "state": state}


def _one_model(trainer: Trained) -> nn.Module:
    """The job's model; under a pipeline, one stage of it, which has the same modules."""
    engine = trainer.engine
    return engine.engines[0].model if isinstance(engine, RankEngine) else engine.model


def _python_generator() -> torch.Tensor:
    _, words, gauss = random.getstate()
    return torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64)


def _numpy_generator() -> torch.Tensor:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    inner = state["state"]
    return torch.tensor([*inner["key"], inner["pos"], state["has_gauss"], state["gauss"]], dtype=torch.float64)
