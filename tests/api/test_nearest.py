"""The strategy that a run goes on with when it has lost ranks."""

import pytest

import tiny_jobs
from meshwright.api.nearest import nearest_strategy
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.strategy import Strategy


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("ddp", "ddp"),  # fits any number of ranks, so it stays as written
        ("fsdp,bf16,ac=full", "fsdp,bf16,ac=full"),
        ("hsdp=2x2", "fsdp=2"),
        ("fsdp=4,bf16", "fsdp=2,bf16"),
        ("tp=2,fsdp=2", "tp=2"),
    ],
)
def test_the_nearest_strategy(wanted: str, found: str) -> None:
    job = tiny_jobs.transformer
    nearest = nearest_strategy(job, describe(job), Strategy.parse(wanted), ranks=2, per_node=2, device="cpu")
    assert str(nearest) == str(Strategy.parse(found))


def test_nothing_like_it_fits() -> None:
    job = tiny_jobs.transformer
    with pytest.raises(Refused, match="the run needs its nodes back"):
        wanted = Strategy.parse("fsdp=4,graphs")  # graphs need a GPU
        nearest_strategy(job, describe(job), wanted, ranks=2, per_node=2, device="cpu")
