"""Make operators on CPU tensors compute, and save for backward, what they would on a GPU.

A build of PyTorch without CUDA has no CUDA tensors, not even fake ones. Some composite operators choose their kernel by
the device, and so save other tensors for backward; then a step needs another amount of memory. PyTorch decomposes such
operators before autograd sees them. While `as_on_cuda()` is active they are decomposed as on a GPU:

| operator | on a CPU | on a GPU |
| --- | --- | --- |
| `scaled_dot_product_attention` | a flash kernel for CPUs | flash (16 bits), cuDNN's (masks), efficient or composed |
| `rms_norm` | composed of five operators | one that saves its input and one fp32 number per row |
| `lstm`, `gru`, `rnn_tanh`, `rnn_relu`, also packed | a layer or a time step at a time | all by cuDNN |
| `lstm_cell`, `gru_cell` | composed of a dozen operators | two products and one kernel, which saves both |
| `ctc_loss` | reads the lengths of targets | the same; here the longest that fit |
| `dropout` | a mask in the input's dtype; of 0, a copy | a mask of bools; of 0, its input |
| `batch_norm`, not in bf16 | saves its input | saves a dense copy of one that is not dense, such as a transposed one |
| statistics of `layer_norm`, `batch_norm` | in the input's dtype | in fp32 |

All others save the same on both. GPUs since Hopper take cuDNN's attention wherever it is able to run. Without a mask it
saves what flash attention does, and is called that here. Meta tensors use a third attention, neither the CPU's nor the
GPU's; `as_on_cpu()` gives them the CPU's. The replacements compute wrong values, so use them on tensors without values
only:

    with FakeTensorMode(), as_on_cuda():
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from meshwright.describe.ctc import ctc_loss
from meshwright.describe.dtypes import HALF
from meshwright.describe.recurrent import MODES, backward_without_values, on_cudnn, packed_on_cudnn
from meshwright.describe.recurrent_cells import WITHOUT_VALUES, gru_cell, lstm_cell
from meshwright.recording.dtensor import dtensor_type
from meshwright.torch_private import operators
from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.fake_tensors import FakeTensor
from meshwright.torch_private.modes import TorchDispatchMode, outside_of_modes

aten = torch.ops.aten
FLASH_WIDEST = 256
"""The widest head that flash attention supports."""
CUDNN_WIDEST = 128
"""The widest head of cuDNN's attention."""
ALIGNED = 16
"""Bytes that the rows of efficient attention's heads must be a multiple of; flash attention pads them instead."""
_active = 0
_compiled = False


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """While active, operators on CPU and meta tensors are decomposed as on CUDA tensors. May be nested."""
    with composites_as_on_cuda(), _Statistics():
        yield


@contextmanager
def composites_as_on_cuda() -> Iterator[None]:
    """The same without fp32 statistics of norms, which need a mode that every operator passes through."""
    global _active
    _active += 1
    kernels = {(name, key): kernel for name, kernel in _COMPOSITES.items() for key in ("AutogradCPU", "AutogradMeta")}
    try:
        with (
            operators.replaced_kernels(kernels | _RECURRENT_BACKWARD | WITHOUT_VALUES)
            if _active == 1
            else nullcontext()
        ):
            yield
    finally:
        _active -= 1


@contextmanager
def as_on_cpu() -> Iterator[None]:
    """While active, attention on meta tensors is decomposed as on a CPU."""
    with operators.replaced_kernels({("scaled_dot_product_attention", "AutogradMeta"): _attention_on_cpu}):
        yield


@contextmanager
def steps_at_once() -> Iterator[None]:
    """While active, recurrent layers of fake tensors are one operator, because thousands of time steps take minutes.

    The CTC loss, which often follows them, reads no lengths.
    """
    kernels = {(name, "AutogradCPU"): kernel for name, kernel in _WITHOUT_VALUES.items()}
    with nullcontext() if _active else operators.replaced_kernels(kernels | _RECURRENT_BACKWARD):
        yield


@contextmanager
def as_compiled() -> Iterator[None]:
    """While active, operators are left as a compiler for CUDA would see them."""
    global _compiled
    before, _compiled = _compiled, True
    try:
        yield
    finally:
        _compiled = before


def is_compiled() -> bool:
    """Whether operators are left as a compiler would see them now."""
    return _compiled


def stands_in() -> bool:
    """Whether operators are decomposed as on CUDA tensors now."""
    return _active > 0


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
    fits = _are_grouped if enable_gqa else _have_equal_heads
    if takes_flash(query, key, value, attn_mask, is_causal=is_causal) and fits(query, key, value):
        return flash(query, key, value, dropout_p, is_causal=is_causal, scale=scale)
    if attn_mask is not None and _takes_cudnn(query, key, value, attn_mask) and fits(query, key, value):
        return _cudnn(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if _takes_efficient(query, key, value, attn_mask):
        return _efficient(*arguments, scale)
    return operators.MATH_ATTENTION(*arguments, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]


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
        chosen = operators.choose_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if chosen == SDPBackend.FLASH_ATTENTION.value:
        flash = operators.FLASH_ATTENTION_ON_CPU
        return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]
    return operators.MATH_ATTENTION(*arguments, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]


def _model_of(tensor: Tensor) -> Tensor:
    """A real tensor of the same shape in very little memory, to find out which kernel would be chosen."""
    step = min(tensor.stride(-1), 2)
    row = torch.zeros(tensor.shape[-1] * max(step, 1), dtype=tensor.dtype)
    return row.as_strided(tensor.shape, [0] * (tensor.dim() - 1) + [step]).requires_grad_(tensor.requires_grad)


def takes_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool) -> bool:
    """Whether attention of these tensors on a GPU is a flash kernel."""
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


def _takes_cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether attention with a mask is cuDNN's on a GPU since Hopper. It has no gradient of the mask."""
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and query.dim() == 4
        and query.dtype in HALF
        and not mask.requires_grad
        and all(x.shape[-1] % 8 == 0 and x.shape[-1] <= CUDNN_WIDEST for x in (query, key, value))
        and all(map(_has_dense_rows, (query, key, value, mask)))
    )


def _takes_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dim() == 4
        and query.dtype in (torch.float32, *HALF)
        and query.shape[-1] == key.shape[-1]
        and all(x.shape[-1] * x.itemsize % ALIGNED == 0 for x in (query, key, value))
        and _have_equal_heads(query, key, value)
        and all(map(_has_dense_rows, (query, key, value)))
        and (mask is None or _has_dense_rows(mask))
    )


def _have_equal_heads(*tensors: Tensor) -> bool:
    """Whether no head is broadcast, which no fused kernel does: keys may have one for all queries, as in Falcon."""
    return len({tensor.shape[:-2] for tensor in tensors}) == 1


def _are_grouped(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether each head of keys and values serves a group of the queries' heads."""
    batches = {tensor.shape[:-3] for tensor in (query, key, value)}
    return len(batches) == 1 and key.shape[-3] == value.shape[-3] and query.shape[-3] % key.shape[-3] == 0


def _has_dense_rows(tensor: Tensor) -> bool:
    """Whether the last dim is contiguous. No fused kernel takes a permuted bias, such as T5's."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, *, is_causal: bool, scale: float | None) -> Tensor:
    """The flash kernel. If causal, the last query attends to all keys, the one before it to all but the last."""
    width = q.shape[-1]
    if width % 8:
        q, k, v = (F.pad(x, (0, 8 - width % 8)) for x in (q, k, v))
        scale = scale if scale is not None else width**-0.5
    found = operators.FLASH_ATTENTION(q, k, v, dropout, is_causal, False, scale=scale)[0]
    return found[..., :width] if width % 8 else found  # type: ignore[no-any-return]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    if mask is not None:
        mask = _as_bias(mask, q, k)
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return operators.EFFICIENT_ATTENTION(q, k, v, mask, keeps, dropout, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    """cuDNN's kernel. Its result is laid out like the queries, where efficient attention's is always by tokens."""
    mask = _added(mask, q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return operators.CUDNN_ATTENTION(q, k, v, mask, keeps, dropout, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers that are added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as a bias that is added to the scores, in rows padded to a multiple of 16."""
    mask = _added(mask, query.dtype)
    length = mask.shape[-1]
    if length % 16 and length == key.shape[-2]:
        mask = F.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _rms_norm(input: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return operators.take_apart(aten.rms_norm.default, input, shape, weight, eps)  # type: ignore[no-any-return]
    if _compiled:
        return operators.FUSED_RMS_NORM(input, list(shape), weight, eps)[0]  # type: ignore[no-any-return]
    return _fused_rms_norm(input, list(shape), weight)  # type: ignore[no-any-return]


class _FusedRmsNorm(torch.autograd.Function):
    """Saves its input and one number per row. Its operators read and write as much as the fused kernels."""

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


_fused_rms_norm = direct_apply(_FusedRmsNorm)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and input.numel():
        return aten.native_dropout(input, p, True)[0]  # type: ignore[no-any-return]
    if not _compiled and not (train and p):
        return input  # its decomposition, which compilers see, makes a copy
    return operators.take_apart(aten.dropout.default, input, p, train)  # type: ignore[no-any-return]


def _batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, *rest: Any
) -> Tensor:
    by_cudnn = input.dim() >= 3 and input.dtype != torch.bfloat16 and weight is not None and bias is not None
    if by_cudnn and not _compiled and not _is_dense(input):
        input = input.contiguous()
    output: Tensor = operators.take_apart(aten.batch_norm.default, input, weight, bias, mean, variance, *rest)
    return output


def _is_dense(input: Tensor) -> bool:
    """Whether cuDNN takes a tensor as it is: in the order of its dims, or with the channels innermost."""
    formats = [torch.contiguous_format, *({4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(input.dim(), []))]
    return any(input.is_contiguous(memory_format=one) for one in formats)


def _if_sizes_known(name: str) -> Callable[..., Any]:
    """A recurrent layer over a packed sequence; as on a CPU if its batch sizes have no values."""
    operator, run_on_cudnn = getattr(aten, name).data, packed_on_cudnn(name)

    def run(data: Tensor, batch_sizes: Tensor, *others: Any) -> Any:
        if isinstance(batch_sizes, FakeTensor) or batch_sizes.is_meta:
            return operators.take_apart(operator, data, batch_sizes, *others)
        return run_on_cudnn(data, batch_sizes, *others)

    return run


_COMPOSITES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "batch_norm": _batch_norm,
    **{f"{name}.input": on_cudnn(name) for name in MODES},
    **{f"{name}.data": _if_sizes_known(name) for name in MODES},
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    "ctc_loss.Tensor": ctc_loss,
    "ctc_loss.IntList": ctc_loss,
}
_RECURRENT_BACKWARD = {("_cudnn_rnn_backward", "Meta"): backward_without_values}


def _of_fakes(name: str) -> Callable[..., Any]:
    """An operator that runs as on a GPU for fake tensors, and as it is for real ones."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload)

    def run(input: Tensor, *others: Any) -> Any:
        if isinstance(input, FakeTensor):
            return _COMPOSITES[name](input, *others)
        return operators.take_apart(operator, input, *others)

    return run


_WITHOUT_VALUES = {
    name: _of_fakes(name)
    for name in ("gru.input", "rnn_tanh.input", "rnn_relu.input", "ctc_loss.Tensor", "ctc_loss.IntList")
}
"""Operators that a CPU runs a time step at a time, or that read values."""


class _Statistics(TorchDispatchMode):
    """Returns the means and deviations of normalised rows in fp32, those of groups in the dtype of the weights."""

    OPERATORS = (aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dtensor_type() in types:
            return NotImplemented  # a DTensor computes on its local tensor, which is dispatched here
        found = func(*args, **(kwargs or {}))
        if func not in self.OPERATORS or _compiled:
            return found
        output, *statistics = found
        if func is aten.native_group_norm.default and (args[1] is None or args[1].dtype in HALF):
            return found
        return output, *(x if x.dtype not in HALF else torch.empty_like(x, dtype=torch.float32) for x in statistics)
