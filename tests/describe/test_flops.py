"""Operators are counted by PyTorch's formulas, attention with fewer keys than queries under every PyTorch."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from meshwright.describe.flops import count_flops

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
