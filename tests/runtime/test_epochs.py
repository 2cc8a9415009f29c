"""Epochs as a data order counts them."""

import pytest

from meshwright.assemble.batch import Share
from meshwright.runtime.data import Order


@pytest.mark.parametrize(
    ("samples", "batch", "ranks", "drops"), [(26, 8, 1, False), (24, 8, 4, True), (26, 8, 4, True), (27, 8, 2, True)]
)
def test_batches_and_epochs_agree(samples: int, batch: int, ranks: int, drops: bool) -> None:
    """Counted in closed form as `parts` gives them, from every position at which a batch begins."""
    order = Order(samples=samples, global_batch=batch, seed=0, share=Share(ranks=ranks), drop_ragged=drops)
    parts = [part for part, _ in zip(order.parts(0), range(20), strict=False)]
    for place, part in enumerate(parts):
        start = part.end - part.samples
        for epochs in (1, 2, 3):
            until = [p for p in parts[place:] if p.end <= epochs * samples]
            assert order.batches_until(epochs, start) == len(until)
        following = parts[place + 1].end - parts[place + 1].samples if place + 1 < len(parts) else None
        if following is not None:
            assert order.completed(part.end) == following // samples


def test_an_epoch_has_every_sample_once() -> None:
    order = Order(samples=26, global_batch=8, seed=3)
    parts = [part for part, _ in zip(order.parts(0), range(order.batches_until(1)), strict=False)]
    assert sorted(index for part in parts for index in part.indices) == [*range(26)]


def test_evaluation_reads_in_order() -> None:
    order = Order(samples=5, global_batch=2, seed=3, shuffled=False)
    parts = [part.indices for part, _ in zip(order.parts(0), range(order.batches_until(1)), strict=False)]
    assert parts == [(0, 1), (2, 3), (4,)]
