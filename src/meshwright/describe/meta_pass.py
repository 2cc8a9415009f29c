"""Run a pass on meta tensors that report to be CPU tensors, to find structure without values.

PyTorch's fake tensors can do more: they know devices, symbolic sizes and constants. They also take twice the time. So a
pass is tried on meta tensors first. Whatever they cannot do reliably raises `NotOnMeta` or an error of PyTorch's, and
the pass is repeated on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.recording.operation import takes_device
from meshwright.recording.report_as_cpu import META, ReportAsCpu, change_leaves, is_meta, meta_of, tensors_in
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.operators import schema_of

_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


class NotOnMeta(Exception):
    """Meta tensors would behave differently from real ones."""


@contextmanager
def meta_pass(model: nn.Module) -> Iterator[None]:
    """While active, new tensors have no values and report to be on the CPU."""
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        raise NotOnMeta("Recurrent layers use other kernels on a CPU.")
    with _OnCpu(), _MetaPass():
        yield


class _OnCpu(ReportAsCpu):
    """Makes moving a meta tensor to the CPU a no-op."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise NotOnMeta("Autocast ignores meta tensors.")
        if func is torch.Tensor.to and is_meta(args[0]):
            args, kwargs = change_leaves(_from_cpu, (args, kwargs or {}))
        elif func is torch.Tensor.cpu and is_meta(args[0]):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class _MetaPass(TorchDispatchMode):
    """Makes every new tensor a meta tensor. Real tensors that are combined with one are converted for that operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_in((args, kwargs))
        if takes_device(func):
            kwargs["device"] = META
            kwargs.pop("pin_memory", None)
        elif tensors and not any(map(is_meta, tensors)):
            return func(*args, **kwargs)
        if not all(map(is_meta, tensors)):
            if schema_of(func).is_mutable:
                raise NotOnMeta(f"{func} would change a tensor that has values.")
            args, kwargs = change_leaves(meta_of, (args, kwargs))
        if func is _CONVOLUTION and args[0].dim() > 3 and not all(tensor.is_contiguous() for tensor in args[:2]):
            raise NotOnMeta("Convolutions of meta tensors do not keep channels last.")
        found = func(*args, **kwargs)
        if func is _CONVOLUTION_BACKWARD:  # gradients have the strides of their tensors, whatever came in
            return tuple(None if gradient is None else gradient.contiguous() for gradient in found)
        return found


def _from_cpu(leaf: Any) -> Any:
    return META if isinstance(leaf, torch.device | str) and str(leaf) == "cpu" else leaf
