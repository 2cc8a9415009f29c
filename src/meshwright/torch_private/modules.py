"""Inner parts of PyTorch's modules (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.utils import stateless

__all__ = ["BatchNorm", "Dropout", "SyncBatchNormFunction"]

REGISTERED = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module keeps its tensors and its children."""

lend_tensors: Callable[..., AbstractContextManager[Any]] = stateless._reparametrize_module
"""A module has other tensors in here, as in `functional_call` but for longer."""


def convert_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `change(tensor)` in the place of every tensor of a module, as `Module.to` does; modules may override it."""
    module._apply(change)


class AnyBatchNorm(BatchNorm):
    """What `nn.SyncBatchNorm` is where nothing is synchronised: a BatchNorm of any number of dims."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def wrap_compiled_call(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Change what a module that was compiled is called by. Nothing happens to one that was not."""
    if module._compiled_call_impl is not None:
        module._compiled_call_impl = wrap(module._compiled_call_impl)


def overrides_convolution(module: Any, base: Any) -> bool:
    """Whether a plain convolution computes otherwise than `base`, PyTorch's own class."""
    return type(module)._conv_forward is not base._conv_forward


def padding_of_both_sides(module: Any) -> list[int]:
    """A plain convolution's padding as `F.pad` takes it."""
    padding: list[int] = module._reversed_padding_repeated_twice
    return padding


def extra_padding(module: Any, x: torch.Tensor, output_size: list[int] | None) -> list[int]:
    """The `output_padding` of a transposed convolution for an output of this size."""
    sizes = module.stride, module.padding, module.kernel_size, len(module.kernel_size), module.dilation
    found: list[int] = module._output_padding(x, output_size, *sizes)
    return found


def projects_together(module: Any) -> bool:
    """Whether an `nn.MultiheadAttention` keeps the weights of query, key and value in one tensor."""
    return bool(module._qkv_same_embed_dim)


def _weights(self: Any) -> list[torch.Tensor]:
    return [getattr(self, name) for name in self._flat_weights_names]


RNN_READS_ATTRIBUTES = {"_flat_weights": property(_weights, lambda self, value: None)}
"""Members of a subclass of `nn.RNNBase` that reads its weights one by one, and not from a list beside them."""
