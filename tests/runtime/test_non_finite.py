"""A NaN is traced to the module that made it, and the weights stay those before the step."""

from math import nan

import pytest

from non_finite_programs import told
from rank_pool import RankPool


@pytest.mark.parametrize(
    ("model", "mark", "says"),
    [
        ("net", 1e4, "The loss became nan at step 1, first on rank 0, in the forward pass of blocks.2;"),
        ("net", nan, "The loss became nan at step 1, first on rank 0, in its batch, before the model runs;"),
        ("steep", 1e4, "The gradient's norm became nan at step 1, first on rank 0, in the backward pass of root;"),
    ],
)
def test_first_module(model: str, mark: float, says: str) -> None:
    message, steps = told(None, model, mark, "single")
    assert message.replace(f"step {steps}", "step 1").startswith(says)


def test_finite_runs_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(None, "net", 1.0, "single") == ("", 4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp=2", "pp=2:1f1b"])
def test_first_module_on_ranks(two_ranks: RankPool, strategy: str) -> None:
    messages = two_ranks(told, "net", 1e4, strategy)
    assert messages[0] == messages[1]
    assert "in the forward pass of blocks.2;" in messages[0][0], messages[0]
