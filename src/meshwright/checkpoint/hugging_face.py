"""What a model of transformers tells of itself. The package need not be there: its modules are known by name."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn


def hugging_face_of(model: nn.Module, names: Collection[str]) -> dict[str, Any] | None:
    """Prefix and configuration of the model of transformers that a model is, or holds; and its adapter of peft.

    `names` are those of the model's parameters, which a stage of a pipeline does not all hold.
    """
    found = _find(model)
    if found is None:
        return None
    prefix, module = found
    config: Any = module.config
    told = {"prefix": prefix, "config": {**config.to_diff_dict(), "architectures": _kinds(module)[:1]}}
    adapted = next((one for one in model.named_modules() if "PeftModel" in _kinds(one[1], "peft.")), None)
    return told if adapted is None else told | {"adapter": _adapter(adapted[0], adapted[1], names)}


def _adapter(prefix: str, module: Any, names: Collection[str]) -> dict[str, Any]:
    """What `save_pretrained` of peft would write: the adapter's configuration, and its names for our parameters."""
    adapters = list(module.peft_config)
    if len(adapters) != 1:
        return {"adapters": adapters, "config": {}, "names": {}}
    before = f"{prefix}." if prefix else ""
    stand_ins = {name.removeprefix(before): torch.empty(0) for name in names if name.startswith(before)}
    ours = {id(tensor): before + name for name, tensor in stand_ins.items()}
    saved = importlib.import_module("peft").get_peft_model_state_dict(
        module, state_dict=stand_ins, adapter_name=adapters[0], save_embedding_layers=False
    )
    config = {**module.peft_config[adapters[0]].to_dict(), "inference_mode": True}
    return {
        "adapters": adapters,
        "config": json.loads(json.dumps(config, default=_as_json)),
        "names": {theirs: ours[id(tensor)] for theirs, tensor in saved.items() if id(tensor) in ours},
    }


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def differing_names(config: Mapping[str, Any], written: Collection[str]) -> tuple[list[str], list[str]]:
    """Names that `from_pretrained` would not know, and those that it would miss; none where it cannot be asked."""
    # An architecture that transformers does not have, or that cannot be built without weights, cannot be asked.
    with suppress(Exception):
        kind = getattr(importlib.import_module("transformers"), config["architectures"][0])
        with torch.device("meta"):
            fresh = kind(kind.config_class.from_dict(dict(config)))
        tied: dict[int, list[str]] = {}
        for name, tensor in fresh.state_dict(keep_vars=True).items():
            tied.setdefault(id(tensor), []).append(name)
        known = {name for names in tied.values() for name in names}
        missing = [names[0] for names in tied.values() if not set(names) & set(written)]
        return [name for name in written if name not in known], missing
    return [], []


def is_obsolete(model: nn.Module, name: str) -> bool:
    """Whether transformers itself passes over a tensor of this name, as over the masks that old files hold."""
    found = _find(model)
    patterns = getattr(found[1], "_keys_to_ignore_on_load_unexpected", None) if found else None
    return any(re.search(pattern, name) for pattern in patterns or ())


def _find(model: nn.Module) -> tuple[str, nn.Module] | None:
    # Single layers of transformers have a configuration, too; only a whole model can be saved and opened.
    return next((found for found in model.named_modules() if "PreTrainedModel" in _kinds(found[1])), None)


def _kinds(module: nn.Module, package: str = "transformers.") -> list[str]:
    """The classes of transformers that a module is of; the first is its architecture, whatever it was wrapped in."""
    return [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith(package)]
