"""`loss=pieced` under every strategy: the same training as plain PyTorch, and nobody computes all logits."""

import pytest

import pieced_jobs
from rank_pool import RankPool

pytestmark = pytest.mark.slow

THOROUGH = {
    "tied": ["ddp", "zero1,mb=2", "hsdp=2x1", "fsdp:grad-op,ac=full", "layers=2", "ddp,fp16", "pp=2:zb", "tp=2,bf16"],
    "biased": ["fsdp,bf16,mb=2", "zero2,bf16,mb=2", "tp=2"],
    "weighed": ["fsdp", "tp=2"],
    "own_loss": ["fsdp", "pp=2:gpipe", "tp=2"],
    "functional": ["fsdp,bf16", "pp=2:1f1b", "ddp"],
}


@pytest.mark.parametrize(
    ("job", "strategies"),
    [
        ("tied", ["fsdp", "tp=2", "pp=2:1f1b"]),
        ("biased", ["fsdp"]),
        *(pytest.param(job, texts, marks=pytest.mark.thorough) for job, texts in THOROUGH.items()),
    ],
)
def test_trains_as_one_process(two_ranks: RankPool, job: str, strategies: list[str]) -> None:
    for found, needed in two_ranks(pieced_jobs.verdicts, job, [f"{text},loss=pieced" for text in strategies]):
        assert [verdict for verdict in found if not verdict.equal] == []
        assert needed == set()


def test_logits_that_are_read_twice(two_ranks: RankPool) -> None:
    found, needed = two_ranks(pieced_jobs.verdicts, "squared", ["tp=2,loss=pieced"])[0]
    assert all(verdict.equal for verdict in found) and needed
