"""The rules that divide operators over ranks: what they divide, and how they compute the forward pass from parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.collectives import add_up, copy_in, gather, slice_in
from meshwright.torch_private import modules
from meshwright.torch_private.fake_tensors import FakeTensor

Forward = Callable[..., Any]
"""The forward of a divided module: a function of (module, mesh) and the call's arguments. It must read parameters from
the module at call time, when they are gathered and cast."""


@dataclass(frozen=True)
class Way:
    along: str
    size: int
    cuts: dict[str, tuple[int, int]]
    """Dim and pieces by the parameter's name in the module. Parameters not listed stay whole."""
    forward: Forward


@dataclass(frozen=True)
class OperatorKind:
    """Modules that one rule divides."""

    name: str
    classes: tuple[type[nn.Module], ...]
    ways: Callable[[Any], list[Way]]
    """The ways to divide a module, best first."""
    objection: Callable[[Any], str] = lambda module: ""
    """Why a module cannot be divided, regardless of its sizes; empty if it can."""


def _with_bias(module: nn.Module, dim: int) -> dict[str, tuple[int, int]]:
    bias = {"bias": (0, 1)} if module.bias is not None else {}
    return {"weight": (dim, 1), **bias}


def _linear_ways(module: nn.Linear) -> list[Way]:
    return [
        Way("outputs", module.out_features, _with_bias(module, 0), _linear_over_outputs),
        Way("inputs", module.in_features, {"weight": (1, 1)}, _linear_over_inputs),
    ]


def _linear_over_outputs(module: Any, mesh: DeviceMesh, input: torch.Tensor) -> torch.Tensor:
    return gather(F.linear(copy_in(input, mesh), module.weight, module.bias), -1, mesh)


def _linear_over_inputs(module: Any, mesh: DeviceMesh, input: torch.Tensor) -> torch.Tensor:
    out = add_up(F.linear(slice_in(input, -1, mesh), module.weight), mesh)
    return out if module.bias is None else out + module.bias


def _is_transposed_linear(module: Any) -> bool:
    """Hugging Face's Conv1D, of GPT-2: a linear whose weight is (inputs, outputs)."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if type(module).__name__ != "Conv1D" or weight is None or bias is None or weight.dim() != 2:
        return False
    return bool(bias.shape == weight.shape[1:] and getattr(module, "nf", None) == weight.shape[1])


def _transposed_linear_ways(module: Any) -> list[Way]:
    inputs, outputs = module.weight.shape
    return [
        Way("outputs", outputs, _with_bias(module, 1), _transposed_over_outputs),
        Way("inputs", inputs, {"weight": (0, 1)}, _transposed_over_inputs),
    ]


def _transposed_over_outputs(module: Any, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    return gather(F.linear(copy_in(x, mesh), module.weight.t(), module.bias), -1, mesh)


def _transposed_over_inputs(module: Any, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    out = add_up(F.linear(slice_in(x, -1, mesh), module.weight.t()), mesh)
    return out.add(module.bias)


def _convolution_ways(module: Any) -> list[Way]:
    if module.groups > 1:
        return [Way("groups", module.groups, _with_bias(module, 0), _convolve)]
    return [Way("output channels", module.out_channels, _with_bias(module, int(module.transposed)), _convolve)]


def _convolution_objection(module: Any) -> str:
    if module.transposed:
        return ""
    base = next(cls for cls in _CONVOLUTIONS if isinstance(module, cls))
    own = modules.overrides_convolution(module, base)
    return f"its _conv_forward is not nn.{base.__name__}'s" if own else ""


def _convolve(module: Any, mesh: DeviceMesh, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    channels = input.dim() - len(module.kernel_size) - 1
    if module.groups > 1:
        x, groups = slice_in(input, channels, mesh), module.groups // mesh.size()
    else:
        x, groups = copy_in(input, mesh), 1
    out = (_transposed if module.transposed else _plain)(module, x, groups, *args, **kwargs)
    return _gather_channels(out, channels, mesh)


def _plain(module: Any, x: torch.Tensor, groups: int) -> torch.Tensor:
    padding = module.padding
    if module.padding_mode != "zeros":
        x, padding = F.pad(x, modules.padding_of_both_sides(module), mode=module.padding_mode), 0
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(module.kernel_size) - 1]
    out: torch.Tensor = convolve(x, module.weight, module.bias, module.stride, padding, module.dilation, groups)
    return out


def _transposed(module: Any, x: torch.Tensor, groups: int, output_size: list[int] | None = None) -> torch.Tensor:
    extra = modules.extra_padding(module, x, output_size)
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(module.kernel_size) - 1]
    out: torch.Tensor = convolve(
        x, module.weight, module.bias, module.stride, module.padding, extra, groups, module.dilation
    )
    return out


def _gather_channels(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """Gather without changing the memory format."""
    last = x.movedim(dim, -1)
    if not x.is_contiguous() and last.is_contiguous():
        return gather(last, -1, mesh).movedim(-1, dim)
    return gather(x, dim, mesh)


def _embedding_ways(module: nn.Embedding) -> list[Way]:
    return [
        Way("entries", module.num_embeddings, {"weight": (0, 1)}, _embed_over_entries),
        Way("features", module.embedding_dim, {"weight": (1, 1)}, _embed_over_features),
    ]


def _embedding_objection(module: nn.Embedding) -> str:
    if module.max_norm is not None:
        return "its max_norm changes the weight while it is read"
    if module.scale_grad_by_freq:
        return "its scale_grad_by_freq counts entries over all ranks"
    return "its gradient is sparse" if module.sparse else ""


def _embed_over_entries(module: Any, mesh: DeviceMesh, input: torch.Tensor) -> torch.Tensor:
    rows = module.num_embeddings // mesh.size()
    start = rows * mesh.get_local_rank()
    foreign = (input < start) | (input >= start + rows)
    # An index outside the whole table stays out of range here, and fails as in one process.
    elsewhere = foreign & (input >= 0) & (input < module.num_embeddings)
    padding = None if module.padding_idx is None else module.padding_idx - start
    padding = padding if padding is not None and 0 <= padding < rows else None
    out = F.embedding((input - start).masked_fill(elsewhere, 0), module.weight, padding)
    return add_up(out.masked_fill(foreign.unsqueeze(-1), 0), mesh)


def _embed_over_features(module: Any, mesh: DeviceMesh, input: torch.Tensor) -> torch.Tensor:
    return gather(F.embedding(input, module.weight, module.padding_idx), -1, mesh)


def _attention_ways(module: nn.MultiheadAttention) -> list[Way]:
    packed = {"in_proj_weight": (0, 3), "in_proj_bias": (0, 3)}
    apart = {"q_proj_weight": (0, 1), "k_proj_weight": (0, 1), "v_proj_weight": (0, 1)}
    there = {name: cut for name, cut in (packed | apart).items() if getattr(module, name) is not None}
    return [Way("heads", module.num_heads, there | {"out_proj.weight": (1, 1)}, _attend)]


def _attention_objection(module: nn.MultiheadAttention) -> str:
    if type(module.out_proj).forward is not nn.Linear.forward or "forward" in module.out_proj.__dict__:
        return "its out_proj's forward is not nn.Linear's"
    return "it appends its own keys and values" if module.bias_k is not None or module.add_zero_attn else ""


def _attend(
    module: Any,
    mesh: DeviceMesh,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`nn.MultiheadAttention.forward` for this rank's heads; the ranks' outputs are summed."""
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal is a hint that attn_mask is causal; pass attn_mask as well.")
    hint = is_causal and key_padding_mask is None and not need_weights
    q, k, v = _heads(module, mesh, query, key, value)
    mask = None if hint else _mask(module, mesh, attn_mask, key_padding_mask, q)
    dropout = module.dropout if module.training else 0.0
    weights = None
    with _own_draws(mesh, q, dropout):
        if need_weights:
            scores = q @ k.transpose(-2, -1) * module.head_dim**-0.5
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropout)
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, hint)
    out = add_up(F.linear(out.transpose(1, 2).flatten(2), module.out_proj.weight), mesh)
    out = out if module.out_proj.bias is None else out + module.out_proj.bias
    if weights is not None:
        weights = add_up(weights.mean(1) / mesh.size(), mesh) if average_attn_weights else gather(weights, 1, mesh)
    if query.dim() == 2:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    return out if module.batch_first else out.transpose(0, 1), weights


def _heads(module: Any, mesh: DeviceMesh, *inputs: torch.Tensor) -> Iterator[torch.Tensor]:
    """Queries, keys and values of this rank's heads, as (batch, heads, length, features)."""
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if modules.projects_together(module):
        weights = module.in_proj_weight.chunk(3)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    # Self-attention passes the same tensor three times; one copy sends its gradient once.
    copied = {id(x): copy_in(x, mesh) for x in inputs}
    for x, weight, bias in zip(inputs, weights, biases, strict=True):
        projected = F.linear(copied[id(x)], weight, bias).unflatten(-1, (-1, module.head_dim))
        if x.dim() == 2:
            projected = projected.unsqueeze(0)
        elif not module.batch_first:
            projected = projected.transpose(0, 1)
        yield projected.transpose(1, 2)


def _mask(
    module: Any, mesh: DeviceMesh, attention: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor
) -> torch.Tensor | None:
    """The mask to add to the scores of this rank's heads."""
    if attention is not None:
        attention = _additive(attention, q)
        if attention.dim() == 3:
            by_head = attention.unflatten(0, (-1, module.num_heads))
            attention = by_head.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    if padding is None:
        return attention
    padding = _additive(padding, q).view(-1, 1, 1, padding.shape[-1])
    return padding if attention is None else attention + padding


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Turn a boolean mask, in which True means hidden, into numbers to add."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


@contextmanager
def _own_draws(mesh: DeviceMesh, x: torch.Tensor, dropout: float) -> Iterator[None]:
    """Region in which ranks draw different numbers, for their different heads. Afterwards they draw the same again."""
    if not dropout or isinstance(x, FakeTensor):
        yield
        return
    seed = int(torch.randint(2**31, ()))
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.manual_seed(seed + mesh.get_local_rank())
        yield


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_KINDS = (
    OperatorKind("linear", (nn.Linear,), _linear_ways),
    OperatorKind("convolution", _CONVOLUTIONS, _convolution_ways, _convolution_objection),
    OperatorKind("transposed convolution", _TRANSPOSED, _convolution_ways),
    OperatorKind("embedding", (nn.Embedding,), _embedding_ways, _embedding_objection),
    OperatorKind("attention", (nn.MultiheadAttention,), _attention_ways, _attention_objection),
)
_TRANSPOSED_LINEAR = OperatorKind("linear", (), _transposed_linear_ways)


def recognise(module: nn.Module) -> OperatorKind | None:
    if _is_transposed_linear(module):
        return _TRANSPOSED_LINEAR
    return next((kind for kind in _KINDS if isinstance(module, kind.classes)), None)
