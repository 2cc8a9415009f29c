"""Causal attention of a rank's tokens in two parts is that of plain PyTorch, with its gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.strategies.context import causal
from meshwright.strategies.context.causal import attend_to_earlier
from meshwright.torch_private.fake_tensors import FakeTensorMode

OPTIONS: dict[str, Any] = {"dropout_p": 0.0, "scale": None, "enable_gqa": False}
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def tensors(rows: int, columns: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    sizes = [(heads[0], rows), (heads[1], columns), (heads[1], columns)]
    made = [torch.randn(2, count, tokens, 16, dtype=torch.float64) for count, tokens in sizes]
    return [x.to(dtype).requires_grad_() for x in made]


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    rows, columns = query.shape[-2], key.shape[-2]
    mask = torch.arange(columns) <= torch.arange(columns - rows, columns)[:, None]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that attend in two parts."""
    found: list[str] = []
    run = causal.ATTEND_IN_TWO
    monkeypatch.setattr(causal, "ATTEND_IN_TWO", lambda *args: (found.append(args[-1]), run(*args))[1])
    return found


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize(("rows", "columns"), [(4, 12), (5, 6), (1, 40), (64, 192)])
def test_it_is_plain_attention(
    rows: int, columns: int, dtype: torch.dtype, scale: float | None, used: list[str]
) -> None:
    torch.manual_seed(0)
    given = tensors(rows, columns, (4, 4), dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    found, expected = attend_to_earlier(*given, **{**OPTIONS, "scale": scale}), plain(*exact, scale)
    gradient = torch.randn_like(expected)
    limits: Any = {"rtol": LIMITS[dtype], "atol": LIMITS[dtype]}
    torch.testing.assert_close(found.double(), expected, **limits)
    results = (torch.autograd.grad(out, on, gradient.to(out.dtype)) for out, on in ((found, given), (expected, exact)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **limits)
    assert used == ["cpu"]


def test_very_unlike_scores_do_not_overflow(used: list[str]) -> None:
    query, key, value = tensors(4, 12, (2, 2), torch.float64)
    with torch.no_grad():
        key[..., :8, :] *= 1e3
    found = attend_to_earlier(query, key, value, **OPTIONS)
    torch.testing.assert_close(found, plain(query, key, value, None), rtol=1e-10, atol=1e-10)
    assert used


def test_grouped_heads_are_right_whichever_kernel_runs() -> None:
    given = tensors(4, 12, (4, 2), torch.float64)
    found = attend_to_earlier(*given, **{**OPTIONS, "enable_gqa": True})
    torch.testing.assert_close(found, plain(*given, None))


def test_dropout_is_left_to_one_kernel(used: list[str]) -> None:
    attend_to_earlier(*tensors(4, 12, (2, 2), torch.float32), **{**OPTIONS, "dropout_p": 0.5})
    assert not used


def test_a_trace_runs_the_kernels_of_a_gpu(used: list[str]) -> None:
    with FakeTensorMode(), as_on_cuda():
        sizes = ((4, 8), (2, 32), (2, 32))
        made = [torch.empty(1, heads, tokens, 16, dtype=torch.bfloat16) for heads, tokens in sizes]
        given = [x.requires_grad_() for x in made]
        attend_to_earlier(*given, **{**OPTIONS, "enable_gqa": True}).sum().backward()
        assert [x.grad.shape for x in given if x.grad is not None] == [x.shape for x in given]
    assert used == ["flash"]
