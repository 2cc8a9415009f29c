"""Meta tensors that report to be on the CPU, and walks over the arguments of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.torch_private import tensors

META = torch.device("meta")
_CPU = torch.device("cpu")
IS_META: Any = vars(tensors.TensorBase)["is_meta"].__get__
DEVICE: Any = vars(tensors.TensorBase)["device"].__get__
is_meta = tensors.is_meta
"""Whether a tensor really is a meta tensor, whatever device it reports."""


class ReportAsCpu(TorchFunctionMode):
    """Makes meta tensors report the device CPU, because some code, such as `trunc_normal_`, skips meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == IS_META:
            return is_meta(args[0]) and not self.hides(args[0])
        result = func(*args, **(kwargs or {}))
        return _CPU if func == DEVICE and result == META and self.hides(args[0]) else result

    def hides(self, tensor: torch.Tensor) -> bool:
        """Whether a meta tensor reports to be on the CPU."""
        return True


def meta_of(leaf: Any) -> Any:
    """A meta tensor with the layout of a tensor; anything else unchanged."""
    if not isinstance(leaf, torch.Tensor) or is_meta(leaf):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results."""
    return leaves_in(torch.Tensor, tree)


def leaves_in(kind: type, tree: Any) -> list[Any]:
    """The leaves of one class among an operator's arguments or results."""
    found: list[Any] = []
    _collect(kind, (tree,), found)
    return found


def _collect(kind: type, values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(kind, value, found)
        elif isinstance(value, dict):
            _collect(kind, value.values(), found)


def change_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """`tree_map` for an operator's arguments: only tuples, lists and dicts, but several times as fast."""
    if isinstance(tree, tuple | list):
        return type(tree)([change_leaves(change, item) for item in tree])
    if isinstance(tree, dict):
        return {key: change_leaves(change, item) for key, item in tree.items()}
    return change(tree)
