"""Answer libraries that ask whether their tensors are fake as they would be answered in a training step.

transformers makes an attention mask of fake tensors where it would pass `is_causal=True` for real ones, and attention
with a mask is another kernel. Its compiled code makes the mask too, because it asks whether it is being compiled.

PyTorch exchanges fake parameters where `module.to(...)` would leave real ones as they are, and refuses that in a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright.describe.as_on_cuda import is_compiled
from meshwright.torch_private.tensors import storage_id

CHECKS = (("transformers.utils.import_utils", "is_fake_tensor"),)
"""Functions that tell fake tensors from others: their modules and names."""


@contextmanager
def fakes_pass_as_real() -> Iterator[None]:
    """While active, loaded libraries do not recognise fake tensors, except in code that is being compiled."""
    with ExitStack() as stack:
        for module_name, name in CHECKS:
            module = sys.modules.get(module_name)
            if module is not None and hasattr(module, name):
                stack.enter_context(patch.object(module, name, _if_compiled(getattr(module, name))))
        stack.enter_context(patch.object(torch.utils, "swap_tensors", _swap_if_changed(torch.utils.swap_tensors)))
        yield


def _swap_if_changed(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    def swap_others(one: Tensor, other: Tensor) -> None:
        if not (one.dtype == other.dtype and _memory_of(one) == _memory_of(other)):
            swap(one, other)

    return swap_others


def _memory_of(tensor: Tensor) -> tuple[int, ...]:
    return storage_id(tensor.untyped_storage()), int(tensor.storage_offset()), *tensor.shape, *tensor.stride()


def _if_compiled(check: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *args: is_compiled() and check(*args)
