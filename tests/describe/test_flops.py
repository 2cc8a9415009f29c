"""Operators are counted by PyTorch's formulas, attention with fewer keys than queries under every PyTorch."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from meshwright.describe.flops import count_flops, operator_kind, product_shape

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention


def attention(heads: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(2, number, 16, 8, device="meta") for number in (8, heads, heads))


def test_a_product() -> None:
    left, right = torch.empty(3, 4), torch.empty(4, 5)
    assert count_flops(aten.mm.default, (left, right), {}, left @ right) == 2 * 3 * 4 * 5


def test_what_has_no_formula() -> None:
    x = torch.empty(3)
    assert count_flops(aten.relu.default, (x,), {}, x) == 0


@pytest.mark.parametrize("heads", [8, 2, 1])
def test_grouped_heads_compute_as_much_as_all(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the formula, like that of PyTorch 2.11, wants as many heads of keys as of queries."""
    q = attention(heads)[0]
    assert count_flops(FLASH.default, attention(heads), {}, (q,)) == 2 * (2 * 2 * 8 * 16 * 16 * 8)

    def strict(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None) -> int:
        assert query.shape == key.shape == value.shape
        return 7

    monkeypatch.setitem(flop_registry, FLASH, strict)
    assert count_flops(FLASH.default, attention(heads), {}, (q,)) == 7


def test_all_that_pytorch_counts_has_a_kind() -> None:
    counted = [packet for packet in flop_registry if isinstance(packet, torch._ops.OpOverloadPacket)]
    kinds = {packet: operator_kind(getattr(packet, packet.overloads()[0])) for packet in counted}
    assert "other" not in kinds.values()
    assert {kinds[aten.mm], kinds[aten.convolution_backward], kinds[FLASH]} == {"matmul", "convolution", "attention"}
    assert operator_kind(aten.relu.default) == "other"


def test_the_sizes_of_a_product() -> None:
    bias, left, right = torch.empty(5), torch.empty(3, 4), torch.empty(4, 5)
    assert product_shape(aten.mm.default, (left, right)) == (1, 3, 5, 4)
    assert product_shape(aten.addmm.default, (bias, left, right)) == (1, 3, 5, 4)
    batched = left.expand(7, 3, 4), right.expand(7, 4, 5)
    assert product_shape(aten.bmm.default, batched) == (7, 3, 5, 4)
    assert product_shape(aten.relu.default, (left,)) == ()
