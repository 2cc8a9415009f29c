"""Staging buffers of sums over rows, beside those that an H200 allocated."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from measured_workspaces import measured
from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.tracing.meter import Meter, OperatorRun
from meshwright.tracing.reductions import sum_staging


def test_gradients_of_biases_as_an_h200_sums_them() -> None:
    """Gradients of convolutions with channels innermost: the requests are equal to the byte."""
    found = 0
    for row in measured("convolutions"):
        if sum(row.get("db", [])) < 1 << 20:  # the buffer, and counters of the blocks that are done
            continue
        gradient = torch.empty_strided(row["y"], row["ys"], dtype=getattr(torch, row["dt"]), device="meta")
        assert sum_staging(gradient, [dim for dim in range(gradient.dim()) if dim != 1]) == row["db"][0]
        found += 1
    assert found >= 15


@pytest.mark.parametrize(("rows", "columns", "expected"), [(6304, 4096, 132 << 20), (64, 4096, 0)])
def test_sums_over_rows_of_a_matrix(rows: int, columns: int, expected: int) -> None:
    assert sum_staging(torch.empty(rows, columns, device="meta"), [0]) == expected


def test_sums_along_memory_take_nothing() -> None:
    assert sum_staging(torch.empty(6304, 4096, device="meta"), [1]) == 0
    assert sum_staging(torch.empty(4096, 6304, device="meta").t(), [0]) == 0
    assert sum_staging(torch.empty(0, 16, device="meta"), [0]) == 0
    assert sum_staging(torch.empty(1, device="meta"), [0]) == 0


@pytest.mark.parametrize(
    ("given", "run", "copied"),
    [
        (torch.bool, lambda x: x.sum(-1), 8),
        (torch.int32, lambda x: x.sum(), 8),
        (torch.bool, lambda x: x.cumsum(0), 8),
        (torch.bfloat16, lambda x: x.cumsum(0, dtype=torch.float32), 4),
        (torch.bfloat16, lambda x: x.sum(-1, dtype=torch.float32), 0),
        (torch.float32, lambda x: x.sum(-1), 0),
        (torch.int64, lambda x: x.sum(-1), 0),
        (torch.bool, lambda x: x.any(-1), 0),
    ],
)
def test_what_is_added_up_in_another_dtype_is_copied_first(
    given: torch.dtype, run: Callable[[Tensor], object], copied: int
) -> None:
    """The gradient of `amax` counts a mask's elements: 402 million took 3 GiB on an H200 (docs/unseen.md)."""
    found: list[OperatorRun] = []
    with as_on_cuda(), Meter(found.append) as meter:
        x = torch.ones(64, 32).to(given)
        before = meter.live
        result = run(x)
    assert found[-1].copied == copied * 64 * 32
    assert meter.peak >= before + copied * 64 * 32 and result is not None
