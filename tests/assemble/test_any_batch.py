"""Batches of any structure train as a plain loop over the same samples does, however they are cut."""

from typing import Any

import pytest
import torch

from any_batch_jobs import ITEMS, JOBS, Pooled, next_step, sequence, unpadded, unsplit
from meshwright.assemble.batch import Share, refuse_unlike_shapes
from meshwright.assemble.check import check
from meshwright.describe.model import describe
from meshwright.errors import JobError, Refused
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.runtime.data import Loader, Order
from meshwright.runtime.run import Run
from meshwright.strategies import Place
from minimal import CPU, make_job, make_trainer
from rank_pool import RankPool
from rank_programs import any_batch_losses

STEPS = 5  # the last batch of an epoch is small


def plain_losses(batches: list[list[int]]) -> list[float]:
    """Forward, loss, backward, clip and step, as anyone would write them."""
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for indices in batches:
        sequences = [sequence(index) for index in indices]
        total, count = next_step(model(sequences), sequences)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item() / count)
    return losses


def order() -> list[list[int]]:
    """The samples of each step."""
    permutations = [
        torch.randperm(ITEMS, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(2)
    ]
    return [epoch[first : first + 8] for epoch in permutations for first in range(0, ITEMS, 8)][:STEPS]


def test_the_order_has_an_uneven_batch() -> None:
    assert [len(batch) for batch in order()] == [8, 8, 8, 2, 8]


@pytest.mark.parametrize("strategy", ["single", "single,mb=3", "single,mb=1"])
@pytest.mark.parametrize("name", JOBS)
def test_loaded_batches(name: str, strategy: str) -> None:
    run = Run(make_trainer(JOBS[name], strategy))
    losses = [run.step(batch).loss for batch in run.batches(steps=STEPS)]
    assert losses == pytest.approx(plain_losses(order()), rel=1e-5)


@pytest.mark.parametrize("strategy", ["single", "single,mb=3"])
@pytest.mark.parametrize("name", JOBS)
def test_whole_batches(name: str, strategy: str) -> None:
    job, trainer = JOBS[name], make_trainer(JOBS[name], strategy)
    assert job.collate is not None
    losses = [trainer.step(job.collate([sequence(index) for index in indices])).loss for indices in order()]
    assert losses == pytest.approx(plain_losses(order()), rel=1e-5)


def test_batches_over_two_ranks(two_ranks: RankPool) -> None:
    found = two_ranks(any_batch_losses, ["ddp,mb=2", "fsdp"], STEPS)
    for losses in (losses for rank in found for losses in rank.values()):
        assert losses == pytest.approx(plain_losses(order()), rel=1e-5)


def whole(job: Job, count: int) -> Any:
    assert job.sample is not None
    return job.sample(count)


def test_a_batch_that_is_not_cut_needs_no_split() -> None:
    single, cut = make_trainer(unsplit), make_trainer(unsplit, "single,mb=2")
    assert single.step(whole(unsplit, 8)).loss > 0
    with pytest.raises(JobError, match=r"batch.rows .*Job\(split=...\)"):
        cut.step(whole(unsplit, 8))
    run = Run(cut)
    assert [run.step(batch).loss for batch in run.batches(steps=2)] == pytest.approx(plain_losses(order()[:2]))


@pytest.mark.parametrize(("name", "path"), [("ragged", r"inputs\[0\]"), ("time_major", r"inputs\[0\]")])
def test_data_parallel_is_refused_where_it_would_cut_something_else(name: str, path: str) -> None:
    place = Place(device="cuda", devices=2, ranks=2, local_ranks=1)
    with pytest.raises(Refused, match=rf"dp cuts .* but {path} has no samples there"):
        check(JOBS[name], describe(JOBS[name]), Strategy.parse("dp"), place)
    assert check(make_job(), describe(make_job()), Strategy.parse("dp"), place).data == "dp"


def test_micro_batches_of_a_pipeline_are_padded_together() -> None:
    """They must have one shape; where they cannot be cut, it is refused that they have not."""
    share = Share(pipelined=2)
    together, apart = (
        next(iter(Loader(job, Order(samples=ITEMS, global_batch=8, seed=0, share=share), device=CPU)))
        for job in (JOBS["time_major"], unsplit)
    )
    refuse_unlike_shapes(together.pieces)
    rows = [row for piece in together.pieces for row in unpadded(piece.data)]
    for row, index in zip(rows, order()[0], strict=True):
        assert torch.equal(row, sequence(index))
    with pytest.raises(JobError, match="pad samples to one length"):
        refuse_unlike_shapes(apart.pieces)


def test_evaluating() -> None:
    batch = [sequence(index) for index in range(7)]
    whole, cut = (make_trainer(JOBS["ragged"], strategy).evaluate([batch]) for strategy in ("single", "single,mb=2"))
    assert whole == pytest.approx(cut, rel=1e-6)


def test_a_number_as_weight_may_depend_on_the_data() -> None:
    """Samples are of all sizes, so their number does not tell the weight; or it depends on values."""
    ragged, time_major = make_trainer(JOBS["ragged"]), make_trainer(JOBS["time_major"])
    assert ragged.facts.weight_per_sample is not None, "one step on fake tensors cannot tell"
    assert not ragged.cutter.data.regular
    assert time_major.facts.weight_per_sample is None
