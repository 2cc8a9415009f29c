"""Operator metadata, and operators that are not public (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

__all__ = ["OpOverload", "flop_registry"]

_aten = torch.ops.aten

FUNCTIONS = torch._C._nn
"""The module with the built-in functions behind `torch.nn.functional`."""

choose_attention: Callable[..., int] = torch._fused_sdp_choice
"""The value of the `SDPBackend` that attention would use for these tensors."""

DEVICE_OF = torch.ops.prim.device.default
"""The operator that reads the device of a fake tensor."""
MATH_ATTENTION = _aten._scaled_dot_product_attention_math
FLASH_ATTENTION = _aten._scaled_dot_product_flash_attention
EFFICIENT_ATTENTION = _aten._scaled_dot_product_efficient_attention
FLASH_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_backward
EFFICIENT_ATTENTION_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward
CUDNN_ATTENTION = _aten._scaled_dot_product_cudnn_attention
CUDNN_ATTENTION_BACKWARD = _aten._scaled_dot_product_cudnn_attention_backward
FLASH_ATTENTION_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
CUDNN_RNN = _aten._cudnn_rnn
CUDNN_RNN_BACKWARD = _aten._cudnn_rnn_backward
FUSED_GRU_CELL = _aten._thnn_fused_gru_cell
FUSED_LSTM_CELL = _aten._thnn_fused_lstm_cell
FUSED_RMS_NORM = _aten._fused_rms_norm
PACK_PADDED_SEQUENCE = _aten._pack_padded_sequence
PAD_PACKED_SEQUENCE = _aten._pad_packed_sequence
READ_NUMBER = _aten._local_scalar_dense.default
"""The operator behind `Tensor.item()`."""
RESHAPE_ALIAS = _aten._reshape_alias
UNSAFE_VIEW = _aten._unsafe_view
FUSED_RMS_NORM_BACKWARD = _aten._fused_rms_norm_backward
SOFTMAX = _aten._softmax
SOFTMAX_BACKWARD = _aten._softmax_backward_data
LOG_SOFTMAX = _aten._log_softmax
LOG_SOFTMAX_BACKWARD = _aten._log_softmax_backward_data
SAFE_SOFTMAX = _aten._safe_softmax
DISTANCES = _aten._cdist_forward
TO_REAL_FOURIER = _aten._fft_c2r
PUT_AT_INDICES = _aten._index_put_impl_


def schema_of(operator: Any) -> torch.FunctionSchema:
    """An operator's name, arguments and return types."""
    schema: torch.FunctionSchema = operator._schema
    return schema


@contextmanager
def replaced_kernels(kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> Iterator[None]:
    """While active, operators of aten have these kernels, by their name and dispatch key.

    Compilers trace through Python's dispatcher, and operators remember what it found there. They have to forget it when
    kernels change: a compiled dropout or attention would have no gradient afterwards, and not fail.
    """
    library = torch.library.Library("aten", "IMPL")
    overloads = [_overload(name) for name, _ in kernels]
    try:
        for (name, key), kernel in kernels.items():
            library.impl(name, kernel, key, allow_override=True)  # torch 2.11 refuses by default
        _forget_dispatch(overloads)
        yield
    finally:
        torch.library.Library._destroy(library)
        _forget_dispatch(overloads)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _forget_dispatch(overloads: Iterable[Any]) -> None:
    for overload in overloads:
        overload._dispatch_cache.clear()


def take_apart(operator: OpOverload, *args: Any) -> Any:
    """Run a composite operator as its decomposition."""
    return operator.decompose(*args)


def reads_values(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether a number or a shape that an operator returns depends on the values of tensors."""
    tags = getattr(operator, "tags", ())
    if operator is _aten.index.Tensor:  # only masks choose how many elements there are
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
