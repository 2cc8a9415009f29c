"""A checkpoint's training state in the forms of torch's own `state_dict`s, for other tools."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.foreign.training import scaler_of
from meshwright.checkpoint.json_state import decode
from meshwright.checkpoint.manifest import MODEL, OPTIMIZER, Manifest, RunState
from meshwright.checkpoint.whole_tensors import WholeTensors

_OF_ADAM = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


class TrainingDocuments:
    """The state of a checkpoint as dicts. Tensors are mapped, and read when they are written."""

    def __init__(self, folder: Path, manifest: Manifest, prefix: str = "") -> None:
        """`prefix` goes in front of every name."""
        self._tensors, self._manifest, self._prefix = WholeTensors(folder, manifest), manifest, prefix

    @property
    def run_state(self) -> RunState:
        return self._manifest.run_state

    def model(self) -> dict[str, torch.Tensor]:
        """The model's `state_dict`: tied names share memory."""
        keys = [key for key in self._manifest.tensors if key.startswith(MODEL)]
        found = {self._prefix + key.removeprefix(MODEL): self._tensors.read(key) for key in keys}
        tied = self.run_state.tied.items()
        return found | {self._prefix + alias: found[self._prefix + first] for alias, first in tied}

    def numbered_optimizer(self) -> dict[str, Any] | None:
        """As `Optimizer.state_dict()` returns it: parameters are numbered group by group, in the job's order.

        `param_names` says which is which; torch's `load_state_dict` accepts it.
        """
        if self.run_state.optimizer is None:
            return None
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        number = 0
        for names, values in self._groups():
            numbers = list(range(number, number + len(names)))
            number += len(names)
            groups.append({**values, "params": numbers, "param_names": [self._prefix + name for name in names]})
            state |= {at: slots for at, name in zip(numbers, names, strict=True) if (slots := self._slots(name))}
        return {"state": state, "param_groups": groups}

    def named_optimizer(self) -> dict[str, Any] | None:
        """As `get_optimizer_state_dict` returns it: by parameter name."""
        if self.run_state.optimizer is None:
            return None
        groups = self._groups()
        slots = {self._prefix + name: self._slots(name) for names, _ in groups for name in names}
        return {
            "state": {name: own or self._unstepped(name, slots) for name, own in slots.items()},
            "param_groups": [{**values, "params": [self._prefix + n for n in names]} for names, values in groups],
        }

    def _unstepped(self, name: str, slots: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Zeros for a parameter without gradient, as Adam begins: PyTorch asks for the state of every parameter."""
        model = next((own for own in slots.values() if own), {})
        if "step" not in model or not model.keys() <= _OF_ADAM:
            return {}
        parameter = self._tensors.read(MODEL + name.removeprefix(self._prefix))
        step = model["step"]
        zero = torch.zeros_like(step) if torch.is_tensor(step) else 0
        return {key: zero if key == "step" else torch.zeros_like(parameter) for key in model}

    def schedule(self) -> dict[str, Any] | None:
        found = self.run_state.schedule
        return None if found is None else decode(found["state"])

    def scaler(self) -> dict[str, Any] | None:
        """The fp16 loss scale as a GradScaler's state."""
        return None if self.run_state.loss_scale is None else scaler_of(self.run_state.loss_scale)

    def _groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        saved: Mapping[str, Any] = self.run_state.optimizer or {"groups": []}
        return [(list(group["names"]), decode(group["values"])) for group in saved["groups"]]

    def _slots(self, name: str) -> dict[str, Any]:
        """Optimizer state of a parameter; a key with a suffix was a plain number."""
        head = f"{OPTIMIZER}{name}/"
        found: dict[str, Any] = {}
        for key in self._slot_keys.get(head, ()):
            slot, _, kind = key.removeprefix(head).partition(":")
            tensor = self._tensors.read(key)
            found[slot] = tensor.item() if kind else tensor
        return found

    @cached_property
    def _slot_keys(self) -> dict[str, list[str]]:
        """Keys of optimizer state, by what they start with."""
        found: dict[str, list[str]] = {}
        for key in self._manifest.tensors:
            if key.startswith(OPTIMIZER):
                found.setdefault(key.rpartition("/")[0] + "/", []).append(key)
        return found
