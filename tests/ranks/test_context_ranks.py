"""Tokens divided over real ranks: gradients equal those of plain PyTorch, whatever the model does with its tokens."""

from pathlib import Path

import pytest

import context_programs as programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow

HYBRIDS = ["cp=4", "cp=2,fsdp", "cp=2,tp=2", "cp=2,pp=2:1f1b"]
TRANSFORMERS = ["Llama", "Qwen3", "Gemma 2", "BERT"]


def check(found: dict[tuple[str, str], object], limit: float = 1e-9) -> None:
    wrong = {case: value for case, value in found.items() if not isinstance(value, float) or not value <= limit}
    assert not wrong, wrong


@pytest.mark.parametrize(
    "text", [*HYBRIDS, "cp=2", "cp=2,zero2", "cp=2,hsdp=2x1", "cp=2,mb=1", "cp=2,ac=full", "cp=2,ac=selective"]
)
def test_a_gpt_equals_plain_pytorch(four_ranks: RankPool, text: str) -> None:
    check(four_ranks(programs.differences, [("GPT", text)])[0])


@pytest.mark.parametrize("text", ["cp=4,bf16", "cp=2,fsdp,bf16,ac=full", "cp=2,tp=2,bf16"])
def test_bf16_copies_of_parameters(four_ranks: RankPool, text: str) -> None:
    """A gradient that is summed twice, or not at all, would be off by a half or more."""
    check(four_ranks(programs.differences, [("GPT", text)])[0], limit=0.1)


@pytest.mark.parametrize("text", ["cp=4", "cp=2,tp=2", "tp=4"])
def test_what_mixes_tokens_otherwise_is_gathered(four_ranks: RankPool, text: str) -> None:
    """Convolutions, pooling, sums along tokens, in-place changes, einsum, own autograd functions, weights elsewhere."""
    check(four_ranks(programs.differences, [("Mixing", text), ("shifted", text)])[0], limit=1e-6)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough) for name in TRANSFORMERS])
def test_transformers_equal_plain_pytorch(four_ranks: RankPool, name: str) -> None:
    """Some compute parts in float32."""
    check(four_ranks(programs.differences, [(name, text) for text in HYBRIDS])[0], limit=1e-6)


def test_a_sliding_window_and_padding(two_ranks: RankPool) -> None:
    check(two_ranks(programs.differences, [("Gemma 2", "cp=2"), ("BERT", "cp=2")])[0], limit=1e-6)


def test_tokens_that_do_not_divide_are_refused(two_ranks: RankPool) -> None:
    ((found,),) = [each.values() for each in two_ranks(programs.differences, [("ViT", "cp=2")])[:1]]
    assert "returns 17 of them" in str(found)


def test_a_llama_gathers_nothing_but_keys_and_values(two_ranks: RankPool) -> None:
    assert two_ranks(programs.gathered_by, "Llama", "cp=2")[0] == {}


def test_a_checkpoint_moves(two_ranks: RankPool, tmp_path: Path) -> None:
    losses, uninterrupted = two_ranks(programs.moved, ["ddp", "tp=2", "cp=2", "ddp"], str(tmp_path))[0]
    assert losses == pytest.approx(uninterrupted, rel=1e-9)
