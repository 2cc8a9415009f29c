"""A run in one process, as a user's loop sees it."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import JobError, Refused
from minimal import make_job, sample

BATCH = sample(20)
ROWS = [{"x": BATCH["x"][index], "y": BATCH["y"][index]} for index in range(20)]


@pytest.fixture
def run() -> Iterator[mw.Run]:
    with mw.setup(make_job(data=ROWS, global_batch=8), "single,mb=4", device="cpu") as made:
        yield made


def test_batches_and_steps(run: mw.Run) -> None:
    results = [run.step(batch) for batch in run.batches(steps=4)]
    assert [result.samples for result in results] == [8, 8, 4, 8]
    assert [result.step for result in results] == [1, 2, 3, 4]
    assert run.position == 28
    assert results[-1].loss < results[0].loss


def test_batches_go_on_where_they_stopped(run: mw.Run) -> None:
    sizes = [batch.samples for batch in run.batches(steps=2)]
    assert sizes + [batch.samples for batch in islice(run.batches(), 2)] == [8, 8, 4, 8]


def test_no_steps_are_no_batches(run: mw.Run) -> None:
    assert list(islice(run.batches(steps=0), 3)) == []


def test_state_is_a_copy_on_the_cpu(run: mw.Run) -> None:
    before = {name: value.clone() for name, value in run.state().items()}
    assert list(before) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    run.step(BATCH)
    assert not torch.equal(run.state()["0.weight"], before["0.weight"])


def test_forward_backward_and_update_are_a_step(run: mw.Run) -> None:
    run.forward_backward(BATCH)
    assert run.update().samples == 20
    assert run.evaluate([BATCH]) > 0


@pytest.mark.parametrize(
    ("parts", "strategy", "error", "message"),
    [
        ({}, "single=2", mw.errors.UnknownTerm, "takes no value"),
        ({}, "ddp,offload=params", Refused, "fsdp"),
        ({"loss": lambda output, batch: output.sum()}, "single", JobError, "(sum, weight)"),
    ],
)
def test_what_setup_refuses(parts: dict[str, Any], strategy: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        mw.setup(make_job(**parts), strategy, device="cpu")
    assert message in str(caught.value)


@pytest.mark.parametrize("rows", [[], None])
def test_no_data(rows: list[Any] | None) -> None:
    with mw.setup(make_job(data=rows), "single", device="cpu") as run, pytest.raises(JobError, match="data"):
        next(iter(run.batches()))
