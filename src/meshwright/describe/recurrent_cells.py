"""Cells of recurrent layers as CUDA runs them: both products, and one kernel for all gates, which keeps its inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.torch_private.operators import FUSED_GRU_CELL, FUSED_LSTM_CELL

GRU_KEPT = 5
"""Numbers that a GRU's cell keeps for each element of its state, besides its inputs."""


def lstm_cell(
    input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    hidden, cells = hx
    hy, cy, _ = FUSED_LSTM_CELL(F.linear(input, w_ih), F.linear(hidden, w_hh), cells, b_ih, b_hh)
    return hy, cy


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    output: Tensor = FUSED_GRU_CELL(F.linear(input, w_ih), F.linear(hx, w_hh), hx, b_ih, b_hh)[0]
    return output


def _lstm(gates: Tensor, hidden_gates: Tensor, cells: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
    return torch.empty_like(cells), torch.empty_like(cells), torch.empty_like(gates)


def _lstm_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cells: Tensor, new_cells: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, ...]:
    return torch.empty_like(kept), torch.empty_like(cells), kept.new_empty(kept.shape[1] if has_bias else 0)


def _gru(gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], GRU_KEPT * hx.shape[1])


def _gru_backward(grad_hy: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    gates = 3 * grad_hy.shape[1]
    of_gates = (grad_hy.new_empty(grad_hy.shape[0], gates) for _ in range(2))
    of_biases = (grad_hy.new_empty(gates if has_bias else 0) for _ in range(2))
    return *of_gates, torch.empty_like(grad_hy), *of_biases


WITHOUT_VALUES = {
    ("_thnn_fused_lstm_cell", "Meta"): _lstm,
    ("_thnn_fused_lstm_cell_backward_impl", "Meta"): _lstm_backward,
    ("_thnn_fused_gru_cell", "Meta"): _gru,
    ("_thnn_fused_gru_cell_backward", "Meta"): _gru_backward,
}
"""The shapes that CUDA's kernels return, by operator and dispatch key: PyTorch has none for tensors without values."""
