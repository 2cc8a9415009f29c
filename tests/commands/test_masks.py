"""Where dropout draws otherwise than one process would, `train` says so before it begins."""

import pytest

from meshwright.facts.strategy import Strategy
from meshwright.preflight.randomness import other_masks


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("ddp=2", "each micro-batch draws for itself"),
        ("single,mb=2", "each micro-batch draws for itself"),
        ("tp=2", "divides the model"),
        ("pp=2:1f1b", "divides the model"),
        ("single,compile", "compiled code"),
    ],
)
def test_other_masks_are_told(strategy: str, why: str) -> None:
    assert why in other_masks(Strategy.parse(strategy))


def test_one_process_draws_its_own() -> None:
    assert other_masks(Strategy.parse("single")) == ""
