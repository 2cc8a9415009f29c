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
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as AttentionOutput
from torch.nn.modules.module import _IncompatibleKeys as incompatible_keys
from torch.nn.utils import stateless

__all__ = ["AttentionOutput", "BatchNorm", "Dropout", "SyncBatchNormFunction", "incompatible_keys"]

REGISTERED = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module keeps its tensors and its children."""

lend_tensors: Callable[..., AbstractContextManager[Any]] = stateless._reparametrize_module
"""Context in which a module uses other tensors, as `functional_call` does for one call."""


def convert_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every tensor of a module by `change(tensor)`, as `Module.to` does; modules may override it."""
    module._apply(change)


class FixedModule(nn.Module):
    """A module that cannot be moved or cast, by `to`, `half`, `cuda` and the like, or wrapped in PyTorch's DDP."""

    def refuse_change(self, what: str) -> None:
        """Raise an error that names the dtype or the device that was asked for."""
        raise NotImplementedError

    def refuse_ddp(self) -> None:
        """Raise an error because DistributedDataParallel is being built around the module."""
        raise NotImplementedError

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:  # what DDP asks a module for before anything else
        self.refuse_ddp()
        return []

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FixedModule:
        for device, dtype in {(p.device, p.dtype) for p in self.parameters()}:
            changed = fn(torch.empty(0, device=device, dtype=dtype))
            if changed.dtype != dtype:
                self.refuse_change(str(changed.dtype).removeprefix("torch."))
            if changed.device != device:
                self.refuse_change(str(changed.device))
        return self


def is_plain_batch_norm(forward: Callable[..., Any]) -> bool:
    """Whether a bound `forward` is PyTorch's own."""
    return getattr(forward, "func", None) is BatchNorm.forward


def given_to_batch_norm(module: BatchNorm, input: torch.Tensor) -> dict[str, Any]:
    """What PyTorch's own `forward` gives to `batch_norm` in training, once it has counted the batch."""
    module._check_input_dim(input)
    share = 0.0 if module.momentum is None else module.momentum
    tracks = module.track_running_stats
    if tracks and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            share = 1.0 / float(module.num_batches_tracked)
    return {
        "input": input,
        "running_mean": module.running_mean if tracks else None,
        "running_var": module.running_var if tracks else None,
        "weight": module.weight,
        "bias": module.bias,
        "momentum": share,
        "eps": module.eps,
    }


class AnyBatchNorm(BatchNorm):
    """A BatchNorm for inputs of any number of dims, as `nn.SyncBatchNorm` is."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module run what `Module.compile` made of it."""
    return module._compiled_call_impl is not None


def wrap_compiled_call(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the compiled call of a module; a module that is not compiled is left alone."""
    if module._compiled_call_impl is not None:
        module._compiled_call_impl = wrap(module._compiled_call_impl)


def overrides_convolution(module: Any, base: Any) -> bool:
    """Whether a convolution's class replaces the computation of `base`, PyTorch's class."""
    return type(module)._conv_forward is not base._conv_forward


def padding_of_both_sides(module: Any) -> list[int]:
    """A convolution's padding in the form that `F.pad` takes."""
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
"""Class members that make a subclass of `nn.RNNBase` read its weights as attributes instead of from a list."""


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes in which a module keeps hooks that its call runs."""

OTHER_ATTRIBUTES = (
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes of every module that do not change what a call computes."""


def has_global_hooks() -> bool:
    """Whether hooks are registered that run in the call of every module."""
    return bool(nn.modules.module._has_any_global_hook())


SETTINGS = torch._C
"""The module whose functions read torch's settings."""
