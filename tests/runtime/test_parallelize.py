"""A loop that somebody else wrote cannot leave gradients half done without an error."""

from collections.abc import Iterator

import pytest
import torch

import meshwright as mw
import minimal
from meshwright.errors import JobError
from meshwright.runtime.parallelize import Parallel


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    made = mw.parallelize(minimal.mlp, "single", device="cpu")
    yield made
    made.close()


def loss(parallel: Parallel) -> torch.Tensor:
    batch = minimal.sample(4)
    return (parallel(batch["x"]) - batch["y"]).square().mean()


def test_a_loop(parallel: Parallel) -> None:
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        for last in (False, True):
            with parallel.micro_batch(last=last):
                losses.append(loss(parallel))
                parallel.backward(losses[-1], last=last)
        with torch.no_grad():
            parallel(minimal.sample(1)["x"])
        parallel.clip_(1.0)
        optimizer.step()
        parallel.updated()
    assert losses[-1] < losses[0]


def test_a_plain_backward(parallel: Parallel) -> None:
    with pytest.raises(JobError, match=r"call parallel\.backward\(loss\) instead"):
        loss(parallel).backward()
    assert all(parameter.grad is None for parameter in parallel.parameters())


def test_steps_without_gradients_of_all_ranks(parallel: Parallel) -> None:
    with pytest.raises(JobError, match=r"parallel\.updated\(\) was called"):
        parallel.updated()
    parallel.backward(loss(parallel), last=False)
    with pytest.raises(JobError, match=r"parallel\.clip_\(max_norm\) was called"):
        parallel.clip_(1.0)


def test_an_update_that_was_forgotten(parallel: Parallel) -> None:
    parallel.backward(loss(parallel))
    with pytest.raises(JobError, match=r"without parallel\.updated\(\)"):
        loss(parallel)
