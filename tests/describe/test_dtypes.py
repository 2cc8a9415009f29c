"""Facts of number formats against what PyTorch says of the same dtypes."""

import pytest
import torch

from meshwright.describe.dtypes import DTYPES, FACTORS, HALF, LOW, WORDS
from meshwright.facts.precision import FORMATS, FULL, NumberFormat
from meshwright.facts.strategy import Strategy


@pytest.mark.parametrize("one", FORMATS.values(), ids=FORMATS.keys())
def test_a_format_is_as_pytorch_says(one: NumberFormat) -> None:
    dtype = getattr(torch, one.torch_name)
    assert dtype.itemsize == one.bytes
    assert torch.finfo(dtype).eps / 2 == one.rounding
    assert one.is_low == (one.bytes < FULL.bytes)


def test_each_format_computes_in_a_dtype() -> None:
    assert list(DTYPES) == ["fp32", "bf16", "fp16", "fp8"]
    assert all(WORDS[DTYPES[word]] == word for word in ("fp32", "bf16", "fp16"))
    assert DTYPES["fp8"] == torch.bfloat16 and {WORDS[dtype] for dtype in FACTORS["fp8"]} == {"fp8"}
    assert LOW == HALF == (torch.bfloat16, torch.float16)


def test_a_strategy_knows_its_format() -> None:
    assert Strategy.parse("fsdp,bf16").number_format is FORMATS["bf16"]
    assert Strategy.parse("ddp").number_format is FULL
    assert [word for word, one in FORMATS.items() if one.scales_loss] == ["fp16"]
