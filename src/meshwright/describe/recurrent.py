"""Recurrent layers as cuDNN runs them: one operator for all time steps, where a CPU runs a layer or a step at a time.

The work of such an operator: the layers' matrices are read again at each time step, and steps wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.operators import CUDNN_RNN, CUDNN_RNN_BACKWARD, schema_of

KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
"""Numbers that backward needs for each element of a layer's output: gates, cells and outputs. With these, a step of an
LSTM of three layers has a peak of 15.8 GiB, and 15.7 on an H200 (docs/data/unseen_gpu.json)."""
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


class RecurrentWork(NamedTuple):
    """The work of a recurrent operator of cuDNN."""

    flops: float
    shape: tuple[int, int, int, int]
    """Time steps of all layers; and rows, columns and inner dim of a step's product."""
    reread: float
    """Bytes of matrices that are read again at later time steps."""


def recurrent_work(func: Any, args: Any) -> RecurrentWork | None:
    """The work of an operator, if it is one of cuDNN's recurrent ones."""
    name = func.overloadpacket.__name__
    if name not in ("_cudnn_rnn", "_cudnn_rnn_backward"):
        return None
    given = dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False))
    time, rows = given["input"].shape[:2][:: -1 if given["batch_first"] else 1]
    matrices = [weight for weight in given["weight"] if weight.dim() == 2]
    recurrent = matrices[1 :: 3 if given["proj_size"] else 2]
    passes = 1 if name == "_cudnn_rnn" else 2
    return RecurrentWork(
        flops=2.0 * passes * time * rows * sum(weight.numel() for weight in matrices),
        shape=(time * len(recurrent), rows, *recurrent[0].shape),
        reread=float((time - 1) * sum(weight.numel() * weight.itemsize for weight in recurrent)),
    )


def on_cudnn(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """`lstm`, `gru`, `rnn_tanh` or `rnn_relu` on a GPU. Dropout between layers is left out."""

    def run(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        hidden, cells = hx if name == "lstm" else (hx, None)
        width = hidden.shape[2] if cells is None else cells.shape[2]
        projected = hidden.shape[2] if hidden.shape[2] != width else 0
        stride = (4 if has_biases else 2) + bool(projected)
        fixed: tuple[Any, ...] = (
            MODES[name],
            width,
            projected,
            num_layers,
            batch_first,
            0.0,
            train,
            bidirectional,
            [],
            None,
        )
        output, *last = _cudnn(KEPT[name], stride, fixed, input, hidden, cells, *params)
        return output, *last[: 2 if name == "lstm" else 1]

    return run


class _Cudnn(torch.autograd.Function):
    """Keeps its input, its output, the weights in one buffer, and what cuDNN reserves."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: int,
        stride: int,
        fixed: tuple[Any, ...],
        x: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        *weights: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        buffer = x.new_empty(sum(weight.numel() for weight in weights))
        output, hy, cy, reserve, _ = CUDNN_RNN(x, weights, stride, buffer, hx, cx, *fixed)
        layers, train = fixed[3], fixed[6]
        # PyTorch's fake kernel does not know how much cuDNN reserves.
        reserved = x.new_empty(prod(output.shape) * layers * kept if train else 0)
        ctx.save_for_backward(x, buffer, hx, cx, output, reserve, reserved, *weights)
        ctx.stride, ctx.fixed, ctx.has_cells = stride, fixed, cx is not None
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, buffer, hx, cx, output, reserve, _, *weights = ctx.saved_tensors
        own = gradients if ctx.has_cells else (*gradients[:2], None)
        asked = [*ctx.needs_input_grad[3:6], any(ctx.needs_input_grad[6:])]
        found = CUDNN_RNN_BACKWARD(x, weights, ctx.stride, buffer, hx, cx, output, *own, *ctx.fixed, reserve, asked)
        return None, None, None, *found[:2], found[2] if ctx.has_cells else None, *found[3]


_cudnn = direct_apply(_Cudnn)


def backward_without_values(
    input: Tensor, weight: Sequence[Tensor], weight_stride0: int, weight_buf: Tensor, hx: Tensor, cx: Any, *others: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The shapes that `_cudnn_rnn_backward` returns, which PyTorch has no kernel for."""
    cells = torch.empty_like(hx if cx is None else cx)
    return torch.empty_like(input), torch.empty_like(hx), cells, [torch.empty_like(each) for each in weight]
