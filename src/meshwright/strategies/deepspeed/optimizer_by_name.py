"""The job's optimizer as a checkpoint wants it: parameter by parameter, where ZeRO has given it flat tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.strategies.deepspeed.pieces import FlatPiece


@dataclass(frozen=True)
class ParameterGroup:
    """One of the groups that the job made."""

    members: list[nn.Parameter]
    """Masters of the pieces; a parameter that is not updated stands for itself."""
    values: dict[str, Any]
    at: int | None
    """Its place among the optimizer's groups; None where nothing of it is updated, so that DeepSpeed dropped it."""


class OptimizerByName:
    """Reads as a `torch.optim.Optimizer` that has the pieces as its parameters."""

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
        """Groups only: whoever loads brings the rest."""
        numbers = self._numbers()
        groups = [{**g, "params": [numbers[id(p)] for p in g["params"]]} for g in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Through the optimizer's own, with flat tensors put together from the pieces."""
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
        """Stage 3 shows its flat tensors to the optimizer one at a time, and none between two steps."""
        shown = [group["params"] for group in self._optimizer.param_groups]
        for group, own in zip(self._optimizer.param_groups, flats, strict=True):
            group["params"] = own
        self._optimizer.load_state_dict(document)
        for group, before in zip(self._optimizer.param_groups, shown, strict=True):
            group["params"] = before

    def _flats(self, group: ParameterGroup) -> list[torch.Tensor]:
        """What the optimizer has in the place of a group's parameters."""
        pieces = [self._pieces[id(master)] for master in group.members if id(master) in self._pieces]
        return list({id(piece.flat): piece.flat for piece in pieces}.values())

    def _numbers(self) -> dict[int, int]:
        """As `state_dict` numbers parameters: through all groups."""
        return {id(p): number for number, p in enumerate(p for group in self._groups for p in group.members)}


def _piece_of(piece: FlatPiece, value: Any) -> Any:
    return piece.of(value) if torch.is_tensor(value) and value.shape == piece.flat.shape else value


def _put(piece: FlatPiece, kept: dict[str, Any], state: dict[str, Any], there: dict[str, Any]) -> None:
    """Add what was kept of one parameter to the state of the flat tensor that it lies in."""
    for key, value in kept.items():
        if not torch.is_tensor(value) or value.shape != piece.master.shape:
            state.setdefault(key, value)  # a counter, which is the same for all that are updated together
            continue
        if key not in state:
            state[key] = there[key] if torch.is_tensor(there.get(key)) else torch.zeros_like(piece.flat)
        own = piece.of(state[key])
        if own.data_ptr() != value.data_ptr():
            own.copy_(value)
