"""Meta tensors that pass for tensors on the CPU, and what handles the arguments of operators on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.torch_private import tensors

META = torch.device("meta")
_CPU = torch.device("cpu")
IS_META: Any = vars(tensors.TensorBase)["is_meta"].__get__
DEVICE: Any = vars(tensors.TensorBase)["device"].__get__
is_meta = tensors.is_meta
"""What a tensor is behind the CPU device that it reports."""


class ReportAsCpu(TorchFunctionMode):
    """Lets code believe that its tensors are on the CPU: `trunc_normal_`, for one, skips meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == IS_META:
            return is_meta(args[0]) and not self.hides(args[0])
        result = func(*args, **(kwargs or {}))
        return _CPU if func == DEVICE and result == META and self.hides(args[0]) else result

    def hides(self, tensor: torch.Tensor) -> bool:
        """Whether a meta tensor passes for one on the CPU."""
        return True


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among what an operator takes or gives."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, tuple | list):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)


def change_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """`tree_map` over what an operator takes and gives, which is tuples, lists and dicts; several times as fast."""
    if isinstance(tree, tuple | list):
        return type(tree)([change_leaves(change, item) for item in tree])
    if isinstance(tree, dict):
        return {key: change_leaves(change, item) for key, item in tree.items()}
    return change(tree)
