"""Find each parameter in ZeRO's flat tensors: a rank's piece of it is a range of one of them.

ZeRO gives the job's optimizer flat tensors; `OptimizerByName` presents it to checkpoints parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.strategies.cuts import Stretch


@dataclass(frozen=True)
class FlatPiece:
    """This rank's part of one parameter; it may be empty."""

    name: str
    parameter: nn.Parameter
    """The model's."""
    flat: torch.Tensor
    """The optimizer's tensor: the concatenated masters of many parameters."""
    at: int
    """The start of the piece in `flat`."""
    length: int
    stretch: Stretch

    @cached_property
    def master(self) -> nn.Parameter:
        """The piece of the masters as a separate parameter."""
        return nn.Parameter(self.of(self.flat.detach()))

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor with the layout of `flat`."""
        return flat.narrow(0, self.at, self.length)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements of a whole tensor."""
        return whole.reshape(-1).narrow(0, self.stretch.start, self.length)


def pieces_of(optimizer: Any, names: dict[int, str], shapes: dict[str, torch.Size]) -> Iterator[FlatPiece]:
    """All pieces that a ZeRO optimizer updates on this rank; `names` are keyed by the parameters' ids."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _of_stage_3(optimizer, names, shapes)
        return
    if hasattr(optimizer, "bf16_groups"):  # DeepSpeed has a separate optimizer for stage 1 in bf16
        groups, flats = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    else:
        groups, flats = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
    for group, flat in zip(groups, flats, strict=True):
        for parameter in group:
            yield _of_stage_1_or_2(parameter, flat, names[id(parameter)])


def _of_stage_1_or_2(parameter: nn.Parameter, flat: torch.Tensor, name: str) -> FlatPiece:
    """A group's parameters are concatenated, and each rank has an equal part of the result."""
    shape, mapping = tuple(parameter.shape), parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's own
    if mapping is None:
        return FlatPiece(name, parameter, flat, 0, 0, Stretch(shape=shape, start=0))
    own, there = mapping.hp_fragment_address, mapping.lp_fragment_address
    return FlatPiece(name, parameter, flat, own.start, own.numel, Stretch(shape=shape, start=there.start))


def _of_stage_3(optimizer: Any, names: dict[int, str], shapes: dict[str, torch.Size]) -> Iterator[FlatPiece]:
    """Every parameter is divided evenly; the last ranks have padding."""
    for group in optimizer.fp16_groups:
        for parameter in group:
            name = names[id(parameter)]
            number, at, room = optimizer.grad_position[optimizer.get_param_id(parameter)]
            stretch, length = even_stretch(tuple(shapes[name]), room, dist.get_rank(parameter.ds_process_group))
            yield FlatPiece(name, parameter, optimizer.fp32_partitioned_groups_flat[number], at, length, stretch)


def even_stretch(shape: tuple[int, ...], room: int, rank: int) -> tuple[Stretch, int]:
    """A rank's part of a tensor that is divided into parts of `room` elements, and the part's length."""
    start = min(rank * room, prod(shape))
    return Stretch(shape=shape, start=start), min(room, prod(shape) - start)


@torch.no_grad()
def joined(own: torch.Tensor, stretch: Stretch, group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """Join the ranks' stretches into a whole tensor on every rank. All ranks must call it."""
    flat = torch.zeros(prod(stretch.shape), dtype=own.dtype, device=device)
    flat.narrow(0, stretch.start, own.numel()).copy_(own.detach())
    dist.all_reduce(flat, group=group)
    return flat.view(stretch.shape)


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group that the job made."""

    members: list[nn.Parameter]
    """Masters of the pieces; parameters that are not updated appear themselves."""
    values: dict[str, Any]
    at: int | None
    """Its index in the optimizer's groups; None if DeepSpeed dropped it because none of its members is updated."""


class OptimizerByName:
    """Behaves like a `torch.optim.Optimizer` whose parameters are the pieces."""

    def __init__(self, optimizer: Optimizer, groups: list[ParameterGroup], pieces: list[FlatPiece]) -> None:
        self._optimizer, self._groups = optimizer, groups
        self._pieces = {id(piece.master): piece for piece in pieces}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        live = self._optimizer.param_groups
        values = [group.values if group.at is None else live[group.at] for group in self._groups]
        return [{**own, "params": group.members} for group, own in zip(self._groups, values, strict=True)]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        found = {}
        for piece in self._pieces.values():
            if kept := self._optimizer.state.get(piece.flat):
                found[piece.master] = {key: _piece_of(piece, value) for key, value in kept.items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """The groups only: loading a checkpoint supplies the state."""
        numbers = self._numbers()
        groups = [{**g, "params": [numbers[id(p)] for p in g["params"]]} for g in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the optimizer, with flat tensors assembled from the pieces."""
        flats = [self._flats(group) for group in self._groups if group.at is not None]
        numbers = {id(flat): number for number, flat in enumerate(flat for group in flats for flat in group)}
        states: dict[int, dict[str, Any]] = {}
        by_number = {number: self._pieces.get(master) for master, number in self._numbers().items()}
        for number, kept in state_dict["state"].items():
            if (piece := by_number[number]) is not None:
                there = self._optimizer.state.get(piece.flat, {})
                _put(piece, kept, states.setdefault(numbers[id(piece.flat)], {}), there)
        values = [v for v, group in zip(state_dict["param_groups"], self._groups, strict=True) if group.at is not None]
        groups = [{**v, "params": [numbers[id(flat)] for flat in own]} for v, own in zip(values, flats, strict=True)]
        self._load(flats, {"state": states, "param_groups": groups})

    def _load(self, flats: list[list[torch.Tensor]], document: dict[str, Any]) -> None:
        """Show the optimizer all flat tensors while it loads: stage 3 shows one at a time, and none between steps."""
        shown = [group["params"] for group in self._optimizer.param_groups]
        for group, own in zip(self._optimizer.param_groups, flats, strict=True):
            group["params"] = own
        self._optimizer.load_state_dict(document)
        for group, before in zip(self._optimizer.param_groups, shown, strict=True):
            group["params"] = before

    def _flats(self, group: ParameterGroup) -> list[torch.Tensor]:
        """The flat tensors that hold a group's parameters."""
        pieces = [self._pieces[id(master)] for master in group.members if id(master) in self._pieces]
        return list({id(piece.flat): piece.flat for piece in pieces}.values())

    def _numbers(self) -> dict[int, int]:
        """Parameter numbers as in `state_dict`: consecutive over all groups."""
        return {id(p): number for number, p in enumerate(p for group in self._groups for p in group.members)}


def _piece_of(piece: FlatPiece, value: Any) -> Any:
    return piece.of(value) if torch.is_tensor(value) and value.shape == piece.flat.shape else value


def _put(piece: FlatPiece, kept: dict[str, Any], state: dict[str, Any], there: dict[str, Any]) -> None:
    """Write one parameter's saved state into the state of the flat tensor that contains it."""
    for key, value in kept.items():
        if not torch.is_tensor(value) or value.shape != piece.master.shape:
            state.setdefault(key, value)  # a counter, the same for all parameters of a flat tensor
            continue
        if key not in state:
            state[key] = there[key] if torch.is_tensor(there.get(key)) else torch.zeros_like(piece.flat)
        own = piece.of(state[key])
        if own.data_ptr() != value.data_ptr():
            own.copy_(value)
