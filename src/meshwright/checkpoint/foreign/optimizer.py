"""A foreign optimizer's `state_dict`, in any of the forms that PyTorch writes.

- numbered: `{"state": {0: ...}, "param_groups": [{"params": [0, 1]}]}`, which `Optimizer.state_dict()` returns. Groups
  may also hold `param_names`.
- named: the same with names instead of numbers, which `get_optimizer_state_dict` and FSDP return.
- flat: `{"state.NAME.exp_avg": ..., "param_groups.NAME.lr": ...}`, which `flatten_optimizer_state_dict=True` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.checkpoint.foreign.training import Slots
from meshwright.errors import CheckpointError

STATE, GROUPS = "state.", "param_groups."


def read_optimizer(document: Any, where: str) -> dict[str, Any]:
    """Fields of a `TrainingState`: groups with names and slots, or with numbered slots. `where` names it in errors."""
    if not isinstance(document, Mapping):
        raise CheckpointError(f"{where} is a {type(document).__name__}, not the state_dict of an optimizer.")
    if document and all(str(key).startswith((STATE, GROUPS)) for key in document):
        return _read_flat(document)
    state: Any = document.get("state", {})
    groups: Any = document.get("param_groups")
    if not isinstance(state, Mapping) or not _are_groups(groups):
        raise CheckpointError(f"{where} is not the state_dict of an optimizer: it has no param_groups with params.")
    values = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
    params = [list(group["params"]) for group in groups]
    names = [list(group.get("param_names") or ()) for group in groups]
    if all(isinstance(one, str) for group in params for one in group):
        return {"groups": values, "names": params, "slots": _by_name(params, params, state)}
    if all(len(own) == len(group) for own, group in zip(names, params, strict=True)):
        return {"groups": values, "names": names, "slots": _by_name(names, params, state)}
    return {"groups": values, "numbered": [[_slots(state.get(one)) for one in group] for group in params]}


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(isinstance(one, Mapping) and "params" in one for one in groups)


def _by_name(names: list[list[str]], keys: list[list[Any]], state: Mapping[Any, Any]) -> dict[str, Slots]:
    pairs = [pair for own, group in zip(names, keys, strict=True) for pair in zip(own, group, strict=True)]
    return {name: _slots(state.get(key)) for name, key in pairs}


def _slots(found: Any) -> Slots:
    return found if isinstance(found, Mapping) else {}


def _read_flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter has its own hyperparameters: alike ones form a group."""
    values: dict[str, dict[str, Any]] = {}
    slots: dict[str, dict[str, Any]] = {}
    for key, value in document.items():
        into = slots if key.startswith(STATE) else values
        name, _, slot = key.removeprefix(STATE if into is slots else GROUPS).rpartition(".")
        into.setdefault(name, {})[slot] = value
    groups: list[dict[str, Any]] = []
    names: list[list[str]] = []
    for name, own in values.items():
        if own not in groups:
            groups.append(own)
            names.append([])
        names[groups.index(own)].append(name)
    return {"groups": groups, "names": names, "slots": {name: slots.get(name, {}) for name in values}}
