"""What a transformers model says about itself. The package need not be installed: classes are found by name."""

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
    """Prefix and config of the transformers model that a model is or contains, and its peft adapter.

    `names` are those of all of the model's parameters, because a pipeline stage holds only some of them.
    """
    found = _find(model)
    if found is None:
        return None
    prefix, module = found
    config: Any = module.config
    described = {"prefix": prefix, "config": {**config.to_diff_dict(), "architectures": _kinds(module)[:1]}}
    adapted = next((one for one in model.named_modules() if "PeftModel" in _kinds(one[1], "peft.")), None)
    return described if adapted is None else described | {"adapter": _adapter(adapted[0], adapted[1], names)}


def _adapter(prefix: str, module: Any, names: Collection[str]) -> dict[str, Any]:
    """What peft's `save_pretrained` would write: the adapter's config, and its names for our parameters."""
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
    text = json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set | frozenset) else str(value))
    return {
        "adapters": adapters,
        "config": json.loads(text),
        "names": {theirs: ours[id(tensor)] for theirs, tensor in saved.items() if id(tensor) in ours},
    }


def differing_names(config: Mapping[str, Any], written: Collection[str]) -> tuple[list[str], list[str]]:
    """Names that `from_pretrained` would not know, and names that it would miss; empty if it cannot be tried."""
    # Fails for an architecture that transformers lacks, or that cannot be built without weights.
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
    """Whether transformers itself ignores a tensor of this name, such as the masks in old files."""
    found = _find(model)
    patterns = getattr(found[1], "_keys_to_ignore_on_load_unexpected", None) if found else None
    return any(re.search(pattern, name) for pattern in patterns or ())


def _find(model: nn.Module) -> tuple[str, nn.Module] | None:
    # Single transformers layers have a config too, but only a whole model can be saved and loaded.
    return next((found for found in model.named_modules() if "PreTrainedModel" in _kinds(found[1])), None)


def _kinds(module: nn.Module, package: str = "transformers.") -> list[str]:
    """The transformers classes in a module's bases; the first is its architecture, even if it was subclassed."""
    return [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith(package)]
