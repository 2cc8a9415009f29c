"""Recurrent cells as on CUDA: what they keep, and what their weights get."""

from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.describe.as_on_cuda import as_on_cuda, composites_as_on_cuda
from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.tracing.meter import Meter

ROWS, WIDTH, INPUTS = 64, 256, 192
STATE = 4 * ROWS * WIDTH
"""Bytes of one state."""


def run(cell: nn.RNNCellBase) -> tuple[Any, torch.Tensor]:
    hidden = torch.zeros(ROWS, WIDTH)
    found = cell(torch.zeros(ROWS, INPUTS), (hidden, torch.zeros(ROWS, WIDTH)) if type(cell) is nn.LSTMCell else hidden)
    return found, found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "states"), [(nn.LSTMCell, 2 + 3 * 4), (nn.GRUCell, 1 + 2 * 3 + 5)])
def test_a_cell_keeps_both_products_and_what_its_kernel_keeps(
    kind: type[nn.RNNCellBase], states: int, bias: bool
) -> None:
    with FakeTensorMode(), as_on_cuda():
        cell = kind(INPUTS, WIDTH, bias=bias)
        names: list[str] = []
        with Meter(lambda made: names.append(made.name)) as meter:
            meter.known(list(cell.parameters()))
            found, output = run(cell)
            given = (2 if kind is nn.LSTMCell else 1) * STATE + 4 * ROWS * INPUTS
            kept = meter.live
            output.sum().backward()
    assert found is not None and states * STATE <= kept <= states * STATE + given
    assert [name for name in names if name.startswith("_thnn")] == [
        f"_thnn_fused_{kind.__name__[:-4].lower()}_cell",
        next(name for name in names if name.startswith("_thnn") and "backward" in name),
    ]
    for name, weight in cell.named_parameters():
        assert weight.grad is not None and weight.grad.shape == weight.shape, name


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells_run_on_meta_tensors_as_on_a_device(kind: type[nn.RNNCellBase]) -> None:
    with composites_as_on_cuda(), torch.device("meta"):
        cell = kind(INPUTS, WIDTH)
        run(cell)[1].sum().backward()
    assert all(weight.grad is not None for weight in cell.parameters())


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_real_tensors_compute_what_pytorch_does_afterwards(kind: type[nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    cell, x = kind(8, 4), torch.randn(3, 8)
    expected = cell(x)
    with FakeTensorMode(), as_on_cuda():
        kind(8, 4)(torch.zeros(3, 8))
    torch.testing.assert_close(cell(x), expected)


def test_kernels_that_pytorch_has_are_replaced_also_by_releases_that_refuse_it_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered = "aten/_thnn_fused_lstm_cell/Meta"
    monkeypatch.setattr(torch.library, "_impls", torch.library._impls | {registered})
    monkeypatch.setattr(torch.library.Library, "impl", partialmethod(torch.library.Library.impl, allow_override=False))
    with as_on_cuda():
        assert nn.LSTMCell(4, 4, device="meta")(torch.zeros(1, 4, device="meta"))[0].shape == (1, 4)
