"""Recurrent layers as cuDNN runs them: one operator for all time steps, where a CPU runs a layer or a step at a time.

The work of such an operator: the layers' matrices are read again at each time step, and steps wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.modes import outside_of_modes
from meshwright.torch_private.operators import CUDNN_RNN, CUDNN_RNN_BACKWARD, schema_of
from meshwright.torch_private.tensors import storage_id

GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
KEPT = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 5, "gru": 6}
"""Numbers that backward needs for each element of a layer's state: gates, and an LSTM's cells or the sums that a GRU's
gates are made of. Layers below the last also keep their output."""
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_NAMES = {mode: name for name, mode in MODES.items()}
PRODUCTS = 8 << 20
"""Bytes of workspace that cuDNN takes for the products of each layer and direction."""


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
    given = _arguments(func, args)
    time, rows = _steps_and_rows(given)
    matrices = [weight for weight in given["weight"] if weight.dim() == 2]
    recurrent = matrices[1 :: 3 if given["proj_size"] else 2]
    passes = 1 if name == "_cudnn_rnn" else 2
    waits = time * len(recurrent) // (1 + given["bidirectional"])  # both directions run at once
    return RecurrentWork(
        flops=2.0 * passes * given["input"].shape[:-1].numel() * sum(weight.numel() for weight in matrices),
        shape=(waits, rows, *recurrent[0].shape),
        reread=float((time - 1) * sum(weight.numel() * weight.itemsize for weight in recurrent)),
    )


def _arguments(func: Any, args: Any) -> dict[str, Any]:
    return dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False))


def _steps_and_rows(given: dict[str, Any]) -> tuple[int, int]:
    """Time steps, and rows of each; of a packed sequence the mean."""
    if sizes := given["batch_sizes"]:
        return len(sizes), max(1, sum(sizes) // len(sizes))
    time, rows = given["input"].shape[:2][:: -1 if given["batch_first"] else 1]
    return time, rows


def kept_numbers(mode: str, state: int, layers: int, projected: float = 0.0) -> int:
    """Numbers that cuDNN keeps for backward, as an H200 with cuDNN 9.19 does to the byte.

    `state` are the numbers of one layer's states at all time steps, in all directions. A projected layer also keeps its
    output, before and after the projection to this share of its width.
    """
    own = KEPT[mode] * layers + (layers - 1)
    return round(state * (own + layers * (1 + projected) if projected else own))


def dropped_bytes(passed: int, layers: int, directions: int) -> int:
    """What dropout keeps: a bit per direction for each number that a layer passes on, as if sequences were padded."""
    return (layers - 1) * directions * passed // 8


def recurrent_workspaces(func: Any, args: Any) -> list[tuple[int, ...]]:
    """What an operator of cuDNN allocates besides its results, if it is a recurrent one: held together.

    A copy of the input with time outermost, and a workspace: the weights, the products', and some tensors as wide as
    the gates or the input. Within 15 % of what an H200 takes, for states of at least 256.
    """
    if func.overloadpacket.__name__ not in ("_cudnn_rnn", "_cudnn_rnn_backward"):
        return []
    given = _arguments(func, args)
    x, directions = given["input"], 1 + given["bidirectional"]
    rows = x.shape[:-1].numel()
    state, inputs = rows * given["hidden_size"] * directions * x.itemsize, x.numel() * x.itemsize
    gates = GATES[_NAMES[given["mode"]]]
    if given["bidirectional"]:
        wide = max((gates + 3) * state + inputs, 6 * state + 5 * inputs // 2)
    else:
        wide = max((gates + 1) * state + inputs, 2 * state + 3 * inputs)
    weights = sum(weight.numel() * weight.itemsize for weight in given["weight"])
    workspace = PRODUCTS * given["num_layers"] * directions + weights + wide
    return [(workspace,) if x.is_contiguous() else (inputs, workspace)]


def on_cudnn(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """`lstm`, `gru`, `rnn_tanh` or `rnn_relu` on a GPU."""

    def run(input: Tensor, hx: Any, params: Any, *others: Any) -> tuple[Tensor, ...]:
        return _run(name, input, [], hx, params, *others)

    return run


def packed_on_cudnn(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """The same for a packed sequence, whose batch sizes must be known."""

    def run(data: Tensor, batch_sizes: Tensor, hx: Any, params: Any, *others: Any) -> tuple[Tensor, ...]:
        with outside_of_modes():
            sizes = batch_sizes.tolist()
        return _run(name, data, sizes, hx, params, *others)

    return run


def _run(
    name: str,
    input: Tensor,
    batch_sizes: list[int],
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...]:
    hidden, cells = hx if name == "lstm" else (hx, None)
    width = hidden.shape[2] if cells is None else cells.shape[2]
    projected = hidden.shape[2] if hidden.shape[2] != width else 0
    stride = (4 if has_biases else 2) + bool(projected)
    # Dropout needs a state that only a device can make. Its time is left out, its memory is not.
    fixed = MODES[name], width, projected, num_layers, False, 0.0, train, bidirectional, batch_sizes, None
    rows, each = input.shape[:-1].numel(), width * (1 + bidirectional)
    kept = kept_numbers(name, rows * each, num_layers, projected / width)
    if dropout:
        padded = len(batch_sizes) * batch_sizes[0] if batch_sizes else rows
        passed = padded * (projected or width) * (1 + bidirectional)
        kept += dropped_bytes(passed, num_layers, 1 + bidirectional) // input.itemsize
    steps = input.transpose(0, 1) if batch_first else input  # cuDNN has time outermost, also in its output
    output, *last = _cudnn(kept if train else 0, stride, fixed, steps, hidden, cells, *params)
    return output.transpose(0, 1) if batch_first else output, *last[: 2 if name == "lstm" else 1]


def _weights_in_one_buffer(weights: Sequence[Tensor]) -> Tensor:
    """The weights as cuDNN wants them: all matrices, then all biases; a copy unless that is how they are."""
    ordered = sorted(weights, key=lambda weight: weight.dim() < 2)
    total, at = sum(weight.numel() for weight in weights), ordered[0].storage_offset()
    storage = storage_id(ordered[0].untyped_storage())
    for weight in ordered:
        if storage_id(weight.untyped_storage()) != storage or weight.storage_offset() != at:
            return weights[0].new_empty(total)
        at += weight.numel()
    return ordered[0].as_strided((total,), (1,))


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
        buffer = _weights_in_one_buffer(weights)
        # PyTorch's fake kernel does not know how much cuDNN reserves, which it does while it has its workspace.
        reserved = x.new_empty(kept)
        output, hy, cy, reserve, _ = CUDNN_RNN(x, weights, stride, buffer, hx, cx, *fixed)
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
