"""What a model of transformers tells of itself. The package need not be there: its modules are known by name."""

from __future__ import annotations

import re
from typing import Any

from torch import nn


def hugging_face_of(model: nn.Module) -> dict[str, Any] | None:
    """Prefix and configuration of the model of transformers that a model is, or holds."""
    found = _find(model)
    if found is None:
        return None
    prefix, module = found
    config: Any = module.config
    return {"prefix": prefix, "config": {**config.to_diff_dict(), "architectures": _kinds(module)[:1]}}


def is_obsolete(model: nn.Module, name: str) -> bool:
    """Whether transformers itself passes over a tensor of this name, as over the masks that old files hold."""
    found = _find(model)
    patterns = getattr(found[1], "_keys_to_ignore_on_load_unexpected", None) if found else None
    return any(re.search(pattern, name) for pattern in patterns or ())


def _find(model: nn.Module) -> tuple[str, nn.Module] | None:
    # Single layers of transformers have a configuration, too; only a whole model can be saved and opened.
    return next((found for found in model.named_modules() if "PreTrainedModel" in _kinds(found[1])), None)


def _kinds(module: nn.Module) -> list[str]:
    """The classes of transformers that a module is of; the first is its architecture, whatever it was wrapped in."""
    return [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")]
