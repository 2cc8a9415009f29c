"""Which samples make up which global batch does not depend on who computes them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from meshwright.assemble.batch import Batch, Share, has_stand_ins
from meshwright.assemble.passes import Dropout
from meshwright.errors import MeshwrightError
from meshwright.runtime.data import Loader, Order, RankSamples
from minimal import CPU, make_job

ORDER = Order(samples=22, global_batch=6, seed=3)  # the last batch of an epoch has 4
PER_EPOCH = 4


def parts(order: Order, count: int, position: int = 0) -> list[RankSamples]:
    return list(islice(order.parts(position), count))


def global_batches(order: Order, ranks: int, count: int, position: int = 0) -> list[list[int]]:
    """Each global batch, put together from the parts of all ranks by where their spans lie."""
    rows = [
        parts(replace(order, share=replace(order.share, ranks=ranks, rank=rank)), count, position)
        for rank in range(ranks)
    ]
    batches = []
    for step in zip(*rows, strict=True):
        assert len({part.end for part in step}) == 1
        found: dict[int, int] = {}
        for part in step:
            indices = iter(part.indices)
            places = [span.first + offset for span in part.spans for offset in range(span.length)]
            found |= {place: next(indices) for place in places}
        assert sorted(found) == list(range(step[0].samples))
        batches.append([found[place] for place in sorted(found)])
    return batches


def joined(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def test_every_sample_once_an_epoch() -> None:
    batches = global_batches(ORDER, 1, 2 * PER_EPOCH)
    first, second = joined(batches[:PER_EPOCH]), joined(batches[PER_EPOCH:])
    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second
    assert first != sorted(first)
    assert [len(batch) for batch in batches] == [6, 6, 6, 4] * 2


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_same_batches_on_any_number_of_ranks(ranks: int, micro_batch: int | None) -> None:
    order = replace(ORDER, share=Share(micro_batch=micro_batch))
    assert global_batches(order, ranks, 2 * PER_EPOCH) == global_batches(ORDER, 1, 2 * PER_EPOCH)


@pytest.mark.parametrize("ranks", [1, 3])
def test_going_on_from_any_position(ranks: int) -> None:
    whole = global_batches(ORDER, 2, 3 * PER_EPOCH)
    for done, part in enumerate(parts(ORDER, 2 * PER_EPOCH), start=1):
        assert global_batches(ORDER, ranks, PER_EPOCH, part.end) == whole[done : done + PER_EPOCH]


def test_going_on_with_another_batch_size() -> None:
    """A position counts samples, so what was seen is not seen again in that epoch."""
    seen = global_batches(ORDER, 2, 2)
    rest = global_batches(replace(ORDER, global_batch=5), 3, 2, position=12)
    assert sorted(joined(seen + rest)) == list(range(22))


def test_positions_count_through_epochs() -> None:
    assert [part.end for part in parts(ORDER, 6)] == [6, 12, 18, 22, 28, 34]


CASES = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_seed_and_epoch_give_another_order() -> None:
    epochs = [joined(global_batches(replace(ORDER, seed=seed), 1, PER_EPOCH, 22 * epoch)) for seed, epoch in CASES]
    assert len({tuple(epoch) for epoch in epochs}) == len(CASES)


def test_a_rank_with_nothing_has_a_stand_in() -> None:
    order = replace(ORDER, share=Share(ranks=6, rank=5))
    *_, last = parts(order, PER_EPOCH)
    assert [span.length for span in last.spans] == [0]
    assert len(last.indices) == 1


@pytest.mark.parametrize(("ranks", "kept"), [(2, 4), (4, 4), (5, 3), (6, 3)])
def test_a_ragged_batch_can_be_left_out(ranks: int, kept: int) -> None:
    """Four samples are enough for four ranks, but not for five."""
    order = replace(ORDER, share=Share(ranks=ranks), drop_ragged=True)
    sizes = [part.samples for part in parts(order, 8)]
    assert sizes == ([6, 6, 6, 4][:kept] * 3)[:8]
    assert not any(has_stand_ins(size, ranks, None) for size in sizes)
    after = parts(order, 1, position=parts(order, 3)[-1].end)[0]
    assert after.end == (22 if kept == 4 else 28)


@pytest.mark.parametrize(("samples", "drop_ragged"), [(3, True), (0, False)])
def test_no_batch_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch, samples: int, drop_ragged: bool) -> None:
    """Looking for a batch that never comes would hang every rank."""
    permutation, epochs = Order._permutation, []

    def counted(order: Order, epoch: int) -> list[int]:
        epochs.append(epoch)
        assert len(epochs) < 5, "the order goes through epoch after epoch and gives nothing"
        return permutation(order, epoch)

    monkeypatch.setattr(Order, "_permutation", counted)
    with pytest.raises(MeshwrightError):
        next(replace(ORDER, samples=samples, share=Share(ranks=4), drop_ragged=drop_ragged).parts(0))


class Numbers(Dataset[dict[str, Any]]):
    """Sample i holds i in two ways."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((2,), float(index)), "more": [index]}


def samples_of(batch: Batch) -> tuple[int, ...]:
    return tuple(int(row[0]) for piece in batch.pieces for row in piece.data["x"])


def loader(**options: Any) -> Loader:
    order = replace(ORDER, share=Share(ranks=2, rank=1, micro_batch=2))
    return Loader(make_job(data=Numbers()), order, device=CPU, **options)


@pytest.mark.parametrize("data", [Numbers(), Numbers, lambda: Numbers()], ids=["made", "class", "function"])
def test_data_may_be_made_or_be_what_makes_it(data: Any) -> None:
    source = Loader(make_job(data=data), ORDER, device=CPU)
    assert samples_of(next(iter(source))) == parts(ORDER, 1)[0].indices


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_gives_the_samples_of_the_order(workers: int) -> None:
    source = loader(workers=workers)
    batches = iter(source)
    for part in parts(source.order, PER_EPOCH + 1):
        batch = next(batches)
        assert samples_of(batch) == part.indices
        assert [piece.data["more"][0].tolist() for piece in batch.pieces] == [list(group) for group in part.groups]
        assert (batch.samples, batch.spans) == (part.samples, part.spans)
        assert source.position == part.end, "the position is that of what was handed out, not of what was read ahead"
        assert sum(piece.span.length for piece in batch.pieces) == len(part.indices)
    source.close()


def test_loader_starts_and_goes_on_at_its_position() -> None:
    source = loader(position=18)
    assert next(iter(source)).samples == 4
    assert samples_of(next(iter(source))) == parts(source.order, 1, position=22)[0].indices


def test_loader_uses_the_job_s_collate() -> None:
    job = make_job(data=Numbers(), collate=lambda rows: {"x": torch.stack([row["x"] for row in rows]) + 100})
    first: Iterator[Any] = iter(Loader(job, ORDER, device=CPU))
    assert samples_of(next(first)) == tuple(index + 100 for index in parts(ORDER, 1)[0].indices)


class Augmented(Dataset[Any]):
    """Samples that are drawn from every generator that people use."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = [float(index), random.random(), numpy.random.rand(), torch.rand(()).item()]
        return {"x": torch.tensor(drawn, dtype=torch.float64)}


def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([sample["x"] for sample in samples]) + random.random() * numpy.random.rand()}


def augmented(ranks: int, *, workers: int = 0, position: int = 0, count: int = 6) -> list[torch.Tensor]:
    """Global batches, of one sample each micro-batch, in their order."""
    found: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for rank in range(ranks):
        order = replace(ORDER, share=Share(ranks=ranks, rank=rank, micro_batch=1))
        job = make_job(data=Augmented(), collate=masked)
        loader = Loader(job, order, device=CPU, workers=workers, position=position)
        random.seed(rank)
        for step, batch in enumerate(islice(loader, count)):
            found[step] += [piece.data["x"] for piece in batch.pieces if piece.span.length]
        loader.close()
    return [torch.cat(rows)[torch.cat(rows)[:, 0].argsort()] for rows in found]


def test_augmentation_is_the_same_on_any_ranks_and_workers_and_after_a_resume() -> None:
    whole = augmented(1)
    for other in (augmented(2), augmented(1, workers=2)):
        assert all(torch.equal(one, two) for one, two in zip(whole, other, strict=True))
    again = augmented(1, position=12, count=4)
    assert all(torch.equal(one, two) for one, two in zip(whole[2:], again, strict=True))
    assert not torch.equal(whole[0], whole[4][: len(whole[0])])


def test_a_step_seeds_all_generators_alike() -> None:
    drawn = []
    for _ in range(2):
        Dropout(run_seed=1, device=CPU).seed(4, 2)
        drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]
