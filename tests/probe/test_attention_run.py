"""Traced attention is run by the function that chooses a kernel by the device: same values, here on a CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.probe.attention_run import attention_run
from meshwright.torch_private.operators import CUDNN_ATTENTION, EFFICIENT_ATTENTION, FLASH_ATTENTION

aten = torch.ops.aten


def heads(number: int = 4, length: int = 6) -> torch.Tensor:
    return torch.randn(2, number, length, 8)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_forward_is_the_function(kv_heads: int) -> None:
    q, k, v = heads(), heads(kv_heads), heads(kv_heads)
    run = attention_run(FLASH_ATTENTION.default, (q, k, v, 0.0, True), {"scale": 0.5})
    assert run is not None
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(run(), expected)


def test_a_bias_is_added_and_has_a_gradient_if_asked() -> None:
    q, k, v, gradient = (heads() for _ in range(4))
    bias = torch.randn(2, 1, 6, 6).expand(2, 4, 6, 6)
    for operator in (EFFICIENT_ATTENTION.default, CUDNN_ATTENTION.default):
        forward = attention_run(operator, (q, k, v, bias, True), {})
        assert forward is not None
        torch.testing.assert_close(forward(), F.scaled_dot_product_attention(q, k, v, bias))
    args: list[Any] = [gradient, q, k, v, None, None, None, None, bias, None, None, 6, 6, 0.0, False]
    run = attention_run(aten._scaled_dot_product_cudnn_attention_backward.default, args, {})
    assert run is not None and len(run()) == 3
    for asked in (False, True):
        mask = [True, True, True, asked]
        args = [gradient, q, k, v, bias, None, None, None, None, 0.0, mask]
        run = attention_run(aten._scaled_dot_product_efficient_attention_backward.default, args, {})
        assert run is not None and len(run()) == 3 + asked


def test_backward_runs_again_and_again() -> None:
    q, k, v, gradient = (heads() for _ in range(4))
    args = (gradient, q, k, v, None, None, None, None, 6, 6, 0.0, True, None, None)
    run = attention_run(aten._scaled_dot_product_flash_attention_backward.default, args, {})
    assert run is not None
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*own, is_causal=True), own, gradient)
    for _ in range(2):
        for found, right in zip(run(), expected, strict=True):
            torch.testing.assert_close(found, right)


def test_other_operators_and_causal_attention_to_other_tokens_are_left() -> None:
    q, k = heads(), heads(length=9)
    assert attention_run(aten.mm.default, (q, k), {}) is None
    assert attention_run(FLASH_ATTENTION.default, (q, k, k, 0.0, True), {}) is None
