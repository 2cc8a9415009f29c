"""Facts of number formats against what PyTorch says of the same dtypes."""

import pytest
import torch

from meshwright.describe.dtypes import DTYPES, HALF, LOW, WORDS
from meshwright.facts.precision import FORMATS, FULL, NumberFormat
from meshwright.facts.strategy import Strategy


@pytest.mark.parametrize("one", FORMATS.values(), ids=FORMATS.keys())
def test_a_format_is_as_pytorch_says(one: NumberFormat) -> None:
    dtype = getattr(torch, one.torch_name)
    assert dtype.itemsize == one.bytes
    assert torch.finfo(dtype).eps / 2 == one.rounding
    assert one.is_low == (one.bytes < FULL.bytes)


def test_only_formats_that_run_have_a_dtype() -> None:
    assert list(DTYPES) == ["fp32", "bf16", "fp16"]
    assert {DTYPES[word]: word for word in DTYPES} == WORDS
    assert LOW == HALF == (torch.bfloat16, torch.float16)


def test_a_strategy_knows_its_format() -> None:
    assert Strategy.parse("fsdp,bf16").number_format is FORMATS["bf16"]
    assert Strategy.parse("ddp").number_format is FULL
    assert [word for word, one in FORMATS.items() if one.scales_loss] == ["fp16"]
