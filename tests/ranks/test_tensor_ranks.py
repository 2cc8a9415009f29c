"""Families of models, divided over two and four ranks: the loss and every gradient of the whole model."""

from typing import Any

import pytest

import tensor_programs
from rank_pool import RankPool
from tensor_models import FAMILIES
from tensor_programs import Comparison

pytestmark = pytest.mark.slow

# A bf16 sum over ranks is rounded otherwise than a bf16 sum in one process.
BF16 = 3e-2
# The fused layer of multi-query attention has 4 query heads and 2 more; of grouped-query attention it has 2 groups.
REFUSED_ON_FOUR = {"falcon": "6 heads", "falcon-new": "2 heads"}


def line(name: str, result: Comparison) -> str:
    found = result.refused or f"works, differs by {result.difference:.0e}, holds {result.local:.2f}, {result.gathered}"
    found += f", {result.replayed} recorded {result.unrecorded}"
    return f"{name:12} {found}"


BOTH = ("llama", "gpt2", "t5")


def cases(quick: tuple[str, ...], other: tuple[str, ...], first: int) -> list[Any]:
    """Families with options; every second one runs quickly on two ranks, and the others on four."""
    chosen = {*FAMILIES[first::2], *BOTH}
    found = [pytest.param(name, quick, marks=() if name in chosen else pytest.mark.thorough) for name in FAMILIES]
    return found + [pytest.param(name, other, marks=pytest.mark.thorough) for name in FAMILIES]


@pytest.mark.parametrize(("name", "options"), cases((), ("sequence",), first=0))
def test_two_ranks(two_ranks: RankPool, name: str, options: tuple[str, ...]) -> None:
    result = two_ranks(tensor_programs.compare, name, options)[0]
    print(line(name, result))
    assert result.refused is None and result.equal, result


@pytest.mark.parametrize(("name", "options"), cases(("sequence",), (), first=1))
def test_four_ranks(four_ranks: RankPool, name: str, options: tuple[str, ...]) -> None:
    result = four_ranks(tensor_programs.compare, name, options)[0]
    print(line(name, result))
    if name in REFUSED_ON_FOUR:
        assert result.refused is not None and REFUSED_ON_FOUR[name] in result.refused
    else:
        assert result.refused is None and result.equal, result


@pytest.mark.parametrize("name", ["llama-1kv", "gpt2", pytest.param("t5", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "options", [("ddp",), ("fsdp",), ("fsdp", "recompute", "sequence"), ("ddp", "recompute", "sequence")]
)
def test_with_a_data_axis(four_ranks: RankPool, name: str, options: tuple[str, ...]) -> None:
    result = four_ranks(tensor_programs.compare, name, options)[0]
    assert result.refused is None and result.equal, result


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
@pytest.mark.parametrize("options", [("bf16",), ("bf16", "recompute", "sequence")])
def test_lower_precision(two_ranks: RankPool, name: str, options: tuple[str, ...]) -> None:
    result = two_ranks(tensor_programs.compare, name, options)[0]
    assert result.difference <= BF16 and abs(result.loss - result.whole_loss) <= 1e-3 * result.whole_loss, result


def test_logits_that_are_divided_over_tokens_are_not_gathered(two_ranks: RankPool) -> None:
    result = two_ranks(tensor_programs.compare, "odd vocabulary", ("sequence",))[0]
    assert result.equal and result.gathered == {}, result


def test_sequence_parts_go_over_a_wire(two_ranks: RankPool) -> None:
    assert two_ranks(tensor_programs.wire) == [True, True]
