"""A tensor's identity, history, class and hooks (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["is_traceable_wrapper_subclass"]

TensorBase = torch._C.TensorBase
"""The class that has a tensor's properties as descriptors."""

make_subclass = torch.Tensor._make_subclass
"""A tensor of another class with the same memory."""

make_wrapper = torch.Tensor._make_wrapper_subclass
"""A tensor of another class with a shape and no memory."""


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that a storage shares with no other storage that is alive."""
    return storage._cdata  # type: ignore[no-any-return]


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device, whatever a mode over torch functions makes of the question."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Meta)


def gradient_hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Hooks on a tensor's gradient, and those for when it has been accumulated."""
    return tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)


def set_gradient_hooks(tensor: torch.Tensor, hooks: Any, hooks_after: Any) -> None:
    """Give a tensor another's hooks; setting them registers them with autograd again."""
    if hooks:
        tensor._backward_hooks = hooks
    if hooks_after:
        tensor._post_accumulate_grad_hooks = hooks_after
