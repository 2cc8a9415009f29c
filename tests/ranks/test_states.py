"""Bytes of parameters, gradients and optimizer state on each rank, counted from storages, against each formula."""

import pytest

import rank_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow

# Bytes of (parameters, gradients, optimizer) per parameter with Adam, of n ranks.
FP32 = {
    "ddp": lambda n: (4, 4, 8),
    "zero1": lambda n: (4, 4, 8 / n),
    "zero2": lambda n: (4, 4 / n, 8 / n),
    "fsdp": lambda n: (4 / n, 4 / n, 8 / n),
    "fsdp:grad-op": lambda n: (4 / n, 4 / n, 8 / n),
    "fsdp:no-shard": lambda n: (4, 4, 8),
    "hsdp=1x{n}": lambda n: (4 / n, 4 / n, 8 / n),
}
# With fp32 masters: ZeRO keeps bf16 parameters, and masters beside the moments.
BF16 = {
    "zero1,bf16": lambda n: (2, 4, 12 / n),
    "zero2,bf16": lambda n: (2, 4 / n, 12 / n),
    "fsdp,bf16": lambda n: (4 / n, 4 / n, 8 / n),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", [*FP32, *BF16])
def test_states_are_what_was_promised(request: pytest.FixtureRequest, ranks: int, strategy: str) -> None:
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    count = sum(p.numel() for p in rank_programs.Wide().parameters())
    expected = {**FP32, **BF16}[strategy](ranks)
    for held, promised in pool(rank_programs.states, strategy.format(n=ranks)):
        for cause, per_parameter in zip(("parameters", "gradients", "optimizer"), expected, strict=True):
            assert held[cause] == pytest.approx(count * per_parameter, rel=0.05), cause
            assert promised[cause] == pytest.approx(held[cause], rel=0.05), cause
