"""Have tensors on a CPU compute, and keep for backward, what the same tensors on a GPU would.

A build of PyTorch without CUDA has no CUDA tensors, not even fake ones, and some operators choose their kernel by the
device: what they keep for backward, and so a step's memory, is then another. Those are composite operators, which
PyTorch takes apart before autograd sees them. While `as_on_cuda()` is active they are taken apart as on a GPU:

| operator | on a CPU | on a GPU |
| --- | --- | --- |
| `scaled_dot_product_attention` | a flash kernel of its own | flash (16 bits), efficient (fp32, masks) or composed |
| `rms_norm` | composed of five operators | one that keeps its input and one fp32 number a row |
| `dropout` | a mask in the input's dtype | a mask of bools |
| statistics of `layer_norm`, `group_norm` | in the input's dtype | in fp32 |

All others keep the same on both. Meta tensors would have an attention of their own, neither a CPU's nor a GPU's;
`as_on_cpu()` gives them a CPU's. It stands for results without values, so use it on fake tensors only:

    with FakeTensorMode(), as_on_cuda():
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from meshwright.describe.dtypes import HALF
from meshwright.recording.dtensor import dtensor_type
from meshwright.torch_private.modes import TorchDispatchMode, outside_of_modes
from meshwright.torch_private.operators import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    FLASH_ATTENTION_ON_CPU,
    FUSED_RMS_NORM,
    MATH_ATTENTION,
    choose_attention,
    take_apart,
    unregister,
)

aten = torch.ops.aten
FLASH_WIDEST = 256
"""The widest head that flash attention takes."""
_active = 0
_compiled = False


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """While active, operators on CPU and meta tensors are made of what they are on CUDA tensors. May be nested."""
    global _active
    _active += 1
    library = torch.library.Library("aten", "IMPL") if _active == 1 else None
    try:
        for name, kernel in _COMPOSITES.items() if library else ():
            for key in ("AutogradCPU", "AutogradMeta"):
                library.impl(name, kernel, key)  # type: ignore[union-attr]
        with _Statistics():
            yield
    finally:
        _active -= 1
        if library:
            unregister(library)


@contextmanager
def as_on_cpu() -> Iterator[None]:
    """While active, attention on meta tensors is taken apart as on a CPU."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _attention_on_cpu, "AutogradMeta")
        yield
    finally:
        unregister(library)


@contextmanager
def as_compiled() -> Iterator[None]:
    """While active, operators stay as a compiler for CUDA would find them, and are not stood in for."""
    global _compiled
    before, _compiled = _compiled, True
    try:
        yield
    finally:
        _compiled = before


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    if _takes_flash(query, key, value, attn_mask, is_causal):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _takes_efficient(query, key, value, attn_mask, enable_gqa):
        return _efficient(*arguments, scale)
    return MATH_ATTENTION(*arguments, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]


def _attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    with outside_of_modes():
        q, k, v = map(_model_of, (query, key, value))
        mask = None if attn_mask is None else _model_of(attn_mask)
        chosen = choose_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if chosen == SDPBackend.FLASH_ATTENTION.value:
        return FLASH_ATTENTION_ON_CPU(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]
    return MATH_ATTENTION(*arguments, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]


def _model_of(tensor: Tensor) -> Tensor:
    """A real tensor of the same shape that takes next to no memory, to be asked which kernel takes it."""
    step = min(tensor.stride(-1), 2)
    row = torch.zeros(tensor.shape[-1] * max(step, 1), dtype=tensor.dtype)
    return row.as_strided(tensor.shape, [0] * (tensor.dim() - 1) + [step]).requires_grad_(tensor.requires_grad)


def _takes_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    square = query.shape[-2] == key.shape[-2]
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and query.dim() == 4
        and query.dtype in HALF
        and mask is None
        and len(widths) == 1
        and max(widths) <= FLASH_WIDEST
        and (square or not is_causal)
        and all(map(_has_dense_rows, (query, key, value)))
    )


def _takes_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dim() == 4
        and query.dtype in (torch.float32, *HALF)
        and query.shape[-1] == key.shape[-1]
        and not (enable_gqa and query.shape[1] != key.shape[1])
        and all(map(_has_dense_rows, (query, key, value)))
        and (mask is None or _has_dense_rows(mask))
    )


def _has_dense_rows(tensor: Tensor) -> bool:
    """A bias that was permuted has its last dim's numbers far apart: then no fused kernel takes it (T5's is such)."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, is_causal: bool, scale: float | None) -> Tensor:
    width = q.shape[-1]
    if width % 8:
        q, k, v = (F.pad(x, (0, 8 - width % 8)) for x in (q, k, v))
        scale = scale if scale is not None else width**-0.5
    found = FLASH_ATTENTION(q, k, v, dropout, is_causal, False, scale=scale)[0]
    return found[..., :width] if width % 8 else found  # type: ignore[no-any-return]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    if mask is not None:
        mask = _as_bias(mask, q, k)
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return EFFICIENT_ATTENTION(q, k, v, mask, keeps, dropout, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to scores: a number where the mask is true or false, in rows whose length 16 divides."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    if length % 16 and length == key.shape[-2]:
        mask = F.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _rms_norm(input: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return take_apart(aten.rms_norm.default, input, shape, weight, eps)  # type: ignore[no-any-return]
    if _compiled:
        return FUSED_RMS_NORM(input, list(shape), weight, eps)[0]  # type: ignore[no-any-return]
    return _FusedRmsNorm.apply(input, list(shape), weight)  # type: ignore[no-any-return]


class _FusedRmsNorm(torch.autograd.Function):
    """Keeps its input and one number a row. The operators stand for the kernels: they read and write as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None) -> Tensor:
        ctx.shape = shape
        output, rstd = aten.native_layer_norm(x, shape, weight, None, 1e-6)[::2]
        ctx.save_for_backward(x, weight, rstd)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        x, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2] and weight is not None, False]
        found = aten.native_layer_norm_backward(gradients[0], x, ctx.shape, rstd, rstd, weight, None, wanted)
        return found[0], None, found[1]


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and input.numel():
        return aten.native_dropout(input, p, True)[0]  # type: ignore[no-any-return]
    return take_apart(aten.dropout.default, input, p, train)  # type: ignore[no-any-return]


_COMPOSITES: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
    "dropout": _dropout,
}


class _Statistics(TorchDispatchMode):
    """Means and deviations of normalised rows are in fp32."""

    OPERATORS = (aten.native_layer_norm.default, aten.native_group_norm.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dtensor_type() in types:
            return NotImplemented  # it computes on its local tensor, which comes by here
        found = func(*args, **(kwargs or {}))
        if func not in self.OPERATORS or _compiled:
            return found
        output, *statistics = found
        return output, *(x if x.dtype not in HALF else torch.empty_like(x, dtype=torch.float32) for x in statistics)
