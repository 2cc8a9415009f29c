"""The words that the doctor compares and advises."""

import pytest

from meshwright.api.neighbours import changes, plain_size
from meshwright.api.one_word import advise_word, more_workers
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.runtime.waits import DATA, PEERS
from tiny_jobs import transformer


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        ("ddp", "ddp", 0),
        ("ddp", "fsdp", 1),
        ("ddp=2", "ddp=4", 0),
        ("ddp", "ddp,ac=full", 1),
        ("ddp", "ddp,mb=2", 1),
        ("ddp", "fsdp,ac=full", 2),
        ("fsdp", "fsdp:grad-op", 1),
        ("tp=2", "tp=4", 1),
        ("ddp", "ddp,tp=2", 1),
        ("pp=2:1f1b", "pp=2:1f1b,mb=2", 0),
    ],
)
def test_changes(one: str, other: str, count: int) -> None:
    pair = Strategy.parse(one), Strategy.parse(other)
    assert changes(*pair) == changes(*reversed(pair)) == count


def test_a_whole_micro_batch_is_no_term() -> None:
    assert str(plain_size(Strategy.parse("ddp=2,mb=4"), 8)) == "ddp=2"
    assert str(plain_size(Strategy.parse("ddp=2,mb=2"), 8)) == "ddp=2,mb=2"


def test_more_workers() -> None:
    assert more_workers(step=1.0, loading=0.5, workers=0).startswith("Worth trying: --workers 2,")
    assert "50% less time (500 ms instead of 1 s)" in more_workers(step=1.0, loading=0.5, workers=0)
    assert more_workers(step=1.0, loading=0.75, workers=2).startswith("Worth trying: --workers 6,")


def test_the_cause_decides_the_word() -> None:
    facts = describe(transformer)
    words = [
        advise_word(transformer, facts, Strategy.parse("fsdp"), {"cause": cause, "seconds": 0.5}, step=1.0, ranks=2)
        for cause in (DATA, PEERS)
    ]
    assert "--workers" in words[0]
    assert words[1].startswith("Worth trying: ddp=2 (ddp=2)") and "by forecast" in words[1]
