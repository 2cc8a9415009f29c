"""What recurrent layers keep and take on a GPU, beside what an H200 did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from measured_workspaces import measured
from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.describe.recurrent import dropped_bytes, kept_numbers, recurrent_work, recurrent_workspaces
from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.torch_private.modes import TorchDispatchMode

NAMES = {"lstm": "lstm", "gru": "gru", "tanh": "rnn_tanh", "relu": "rnn_relu"}


class CudnnCalls(TorchDispatchMode):
    """Notes the calls of cuDNN's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "rnn" in func.overloadpacket.__name__:
            self.calls[func.overloadpacket.__name__] = func, args
        return func(*args, **(kwargs or {}))


def rows_of(row: dict[str, Any]) -> int:
    """Rows of all time steps; a packed sequence of the benchmark has samples of all lengths."""
    if not row["packed"]:
        return int(row["t"] * row["n"])
    return sum(max(1, row["t"] * (row["n"] - place) // row["n"]) for place in range(row["n"]))


def test_what_is_kept_is_exact() -> None:
    trained = [row for row in measured("recurrent") if row["train"]]
    for row in trained:
        directions, item = 1 + row["bi"], torch.empty(0, dtype=getattr(torch, row["dt"])).itemsize
        state = rows_of(row) * row["h"] * directions
        told = item * kept_numbers(NAMES[row["mode"]], state, row["layers"], row["proj"] / row["h"])
        passed = row["t"] * row["n"] * (row["proj"] or row["h"]) * directions
        told += dropped_bytes(passed, row["layers"], directions) if row["drop"] else 0
        assert row["kept"] == told + 256, row
    assert len(trained) > 140


def layer_of(row: dict[str, Any]) -> tuple[nn.RNNBase, Tensor]:
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}.get(row["mode"], nn.RNN)
    more: dict[str, Any] = {"proj_size": row["proj"]} if row["proj"] else {}
    more |= {"nonlinearity": row["mode"]} if kind is nn.RNN else {}
    more |= {"batch_first": bool(row["bf"]), "bidirectional": bool(row["bi"]), "dtype": getattr(torch, row["dt"])}
    shape = (row["n"], row["t"], row["i"]) if row["bf"] else (row["t"], row["n"], row["i"])
    return kind(row["i"], row["h"], row["layers"], **more), torch.empty(shape, dtype=more["dtype"])


def test_workspaces_of_large_layers_are_near() -> None:
    large = [row for row in measured("recurrent") if row["h"] >= 512 and not row["packed"] and row["mode"] != "tanh"]
    errors = []
    for row in large:
        with FakeTensorMode(), as_on_cuda(), CudnnCalls() as seen:
            layer, x = layer_of(row)
            layer(x)
        (held,) = recurrent_workspaces(*seen.calls["_cudnn_rnn"])
        errors.append(sum(held) / sum(row["forward"]) - 1)
    assert len(large) > 20 and max(map(abs, errors)) < 0.2
    assert sum(abs(error) < 0.05 for error in errors) > 0.7 * len(errors)


@pytest.mark.parametrize("cells", ["lstm", "gru"])
def test_packed_sequences_are_one_operator(cells: str) -> None:
    sizes, run = torch.tensor([3, 3, 2, 1]), getattr(torch.ops.aten, cells).data
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda(), CudnnCalls() as seen:
        layer = (nn.LSTM if cells == "lstm" else nn.GRU)(8, 6, 2)
        data, state = torch.empty(9, 8, requires_grad=True), torch.empty(2, 3, 6)
        given = [state, state] if cells == "lstm" else state
        output, last, *_ = run(data, sizes, given, layer._flat_weights, True, 2, 0.1, True, False)
        output.sum().backward()
    assert (output.shape, last.shape) == ((9, 6), (2, 3, 6)) and data.grad is not None
    assert set(seen.calls) == {"_cudnn_rnn", "_cudnn_rnn_backward"}
    work = recurrent_work(*seen.calls["_cudnn_rnn"])
    assert work is not None and work.flops == 2 * 9 * sum(p.numel() for p in layer.parameters() if p.dim() == 2)


def test_both_directions_of_a_layer_wait_at_once() -> None:
    def waits(bidirectional: bool) -> int:
        with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda(), CudnnCalls() as seen:
            nn.LSTM(8, 6, 2, bidirectional=bidirectional)(torch.empty(5, 3, 8))
        work = recurrent_work(*seen.calls["_cudnn_rnn"])
        return 0 if work is None else work.shape[0]

    assert waits(False) == waits(True) == 5 * 2


def test_weights_that_are_in_one_buffer_are_not_copied() -> None:
    """Matrices before biases, as the engine casts them."""
    with FakeTensorMode(), as_on_cuda(), CudnnCalls() as seen:
        layer = nn.GRU(8, 6, 2)
        copied = _buffer_after(layer, seen)
        flat = torch.empty(sum(p.numel() for p in layer.parameters()))
        ordered = sorted(layer._flat_weights, key=lambda weight: weight.dim() < 2)
        views = dict(zip(map(id, ordered), flat.split([weight.numel() for weight in ordered]), strict=True))
        layer._flat_weights = [views[id(weight)].view(weight.shape) for weight in layer._flat_weights]
        shared = _buffer_after(layer, seen)
        assert copied.shape == shared.shape == flat.shape
        assert shared.untyped_storage()._cdata == flat.untyped_storage()._cdata != copied.untyped_storage()._cdata


def _buffer_after(layer: nn.RNNBase, seen: CudnnCalls) -> Tensor:
    layer(torch.empty(5, 3, 8))
    found: Tensor = seen.calls["_cudnn_rnn"][1][3]
    return found


def test_the_output_has_time_outermost() -> None:
    """So what reads it batch by batch copies it, as on a GPU."""
    with FakeTensorMode(), as_on_cuda():
        output = nn.LSTM(8, 6, batch_first=True)(torch.empty(3, 5, 8))[0]
    assert output.shape == (3, 5, 6) and output.transpose(0, 1).is_contiguous()
