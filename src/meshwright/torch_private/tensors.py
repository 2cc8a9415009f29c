"""A tensor's storage identity, version, class and hooks (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["is_traceable_wrapper_subclass"]

TensorBase = torch._C.TensorBase
"""The class whose `__dict__` holds the descriptors of a tensor's properties."""

make_subclass = torch.Tensor._make_subclass
"""Makes a tensor of a subclass that shares the memory of another."""

make_wrapper = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a shape and no memory."""


version_of: Callable[[torch.Tensor], int] = TensorBase._version.__get__  # type: ignore[attr-defined]
"""How many times a tensor was changed in place."""


READ_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""How function modes see that a tensor's version is read."""


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that is unique among live storages."""
    return storage._cdata  # type: ignore[no-any-return]


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device, even where a function mode hides it."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Meta)


def gradient_hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Hooks on a tensor's gradient, and hooks that run after it was accumulated."""
    return tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)


def set_gradient_hooks(tensor: torch.Tensor, hooks: Any, hooks_after: Any) -> None:
    """Give a tensor the hooks of another one, and register them with autograd."""
    if hooks:
        tensor._backward_hooks = hooks
    if hooks_after:
        tensor._post_accumulate_grad_hooks = hooks_after
