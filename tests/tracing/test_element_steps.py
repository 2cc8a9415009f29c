"""Elements that kernels compute one at a time, by the layout of their operands."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.tracing.element_steps import CAST, TRANSPOSED
from meshwright.tracing.meter import Meter, OperatorRun

ROWS, WIDTH = 32, 64
SIZE = ROWS * WIDTH


def run(function: Callable[..., Tensor], *given: Tensor) -> OperatorRun:
    """The last operator of a function."""
    found: list[OperatorRun] = []
    with Meter(found.append):
        function(*given)
    return found[-1]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda x: x + torch.empty_like(x), 0.0),
        (lambda x: x * 2, 0.0),
        (lambda x: x + x[0], 1.0),
        (lambda x: x * x[:, :1], 1.0),
        (lambda x: x[:, :1].expand(ROWS, WIDTH) * 2, 1.0),
        (lambda x: x.t().contiguous(), TRANSPOSED),
        (lambda x: x.view(WIDTH, ROWS).t() + x, TRANSPOSED),
        (lambda x: x.float(), CAST),
        (lambda x: x.float().bfloat16(), 0.0),
    ],
)
def test_elementwise(function: Callable[..., Tensor], weight: float) -> None:
    assert run(function, empty(ROWS, WIDTH)).steps == pytest.approx(weight * SIZE)


def test_a_transposed_row_is_copied_before_its_norm() -> None:
    x = empty(ROWS, WIDTH)
    plain, copied = (run(lambda x: F.layer_norm(x, (x.shape[-1],)), one).steps for one in (x, empty(WIDTH, ROWS).t()))
    assert copied == pytest.approx(plain + TRANSPOSED * SIZE)


def test_a_batch_norm_of_few_channels_leaves_processors_idle() -> None:
    def steps(channels: int) -> float:
        x, weight = empty(4, channels, 4096 // channels, 8), empty(channels, dtype=torch.float32)
        return run(lambda x: torch.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)[0], x).steps

    assert steps(16) == 4 * steps(64)


def test_depthwise_convolutions_count_their_own_products_only() -> None:
    def backward(x: Tensor) -> OperatorRun:
        found: list[OperatorRun] = []
        weight = empty(WIDTH, 1, 3, 3).requires_grad_()
        with Meter(found.append):
            result = F.conv2d(x.requires_grad_(), weight, padding=1, groups=WIDTH)
            result.backward(torch.empty_like(result))
        assert [one.name for one in found if one.flops] == ["convolution", "convolution_backward"]
        first, second = (one for one in found if one.flops)
        assert first.shape == second.shape == (WIDTH, 2 * 64, 1, 9)
        assert second.flops == 2 * first.flops == 2 * 2 * WIDTH * 2 * 64 * 9
        return second

    usual, last = empty(2, WIDTH, 8, 8), empty(2, WIDTH, 8, 8).to(memory_format=torch.channels_last)
    assert backward(usual).steps > 3 * backward(last).steps > 0


def test_what_is_read_twice_or_only_filled_counts_once() -> None:
    x = empty(ROWS, WIDTH)
    assert run(lambda x: x * x, x).bytes == 2 * SIZE * x.itemsize
    assert run(torch.zeros_like, x).bytes == SIZE * x.itemsize
