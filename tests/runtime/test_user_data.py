"""A job's data may be a stream or the user's own DataLoader: their samples, order and batches are kept."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler, WeightedRandomSampler, default_collate

from meshwright.assemble.batch import Batch
from meshwright.assemble.passes import seed_host
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.facts.model import ModelFacts
from meshwright.facts.position import DataPosition
from meshwright.facts.strategy import Strategy
from meshwright.runtime.open_loader import open_loader
from meshwright.runtime.run import Run
from minimal import CPU, make_job, make_trainer
from stream_jobs import SAMPLES, Counted, DividedByWorker, Failing, Shuffled, make, padded, sequence

ITEMS = [sequence(index) for index in range(SAMPLES)]
BATCH = 6


@cache
def facts() -> ModelFacts:
    """Of the model of `make`, whatever its data."""
    return describe(make(ITEMS))


def loader_of(data: Any, *, workers: int = 0, position: DataPosition | None = None, **parts: Any) -> Any:
    strategy = Strategy.parse("single").resolve(1)
    trainer = Trainer(make(data, **parts), facts(), strategy, World(device=CPU), seed=0)
    return open_loader(trainer, workers=workers, position=position or DataPosition())


def indices(batch: Batch) -> list[int]:
    return [int(index) for piece in batch.pieces for index in piece.data["index"]]


def drawn(data: Any, *, count: int | None = None, epochs: int | None = None, **options: Any) -> list[list[int]]:
    return [indices(batch) for batch in islice(loader_of(data, **options).batches(epochs=epochs), count)]


def user_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(ITEMS, **{"batch_size": BATCH, "collate_fn": padded} | options)  # type: ignore[arg-type]


def plain(loader: DataLoader[Any], epochs: int) -> list[list[int]]:
    return [batch["index"].tolist() for _ in range(epochs) for batch in loader]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def weighted(generator: torch.Generator | None) -> WeightedRandomSampler:
    return WeightedRandomSampler([float(index % 3) for index in range(SAMPLES)], 20, generator=generator)


class Buckets:
    """Batches of samples of one length, in an order that it draws itself and that changes from epoch to epoch."""

    def __init__(self) -> None:
        self._random = random.Random(5)

    def __iter__(self) -> Iterator[list[int]]:
        lengths = sorted({len(item["rows"]) for item in ITEMS})
        same = [[item["index"] for item in ITEMS if len(item["rows"]) == length] for length in lengths]
        batches = [group[first : first + 4] for group in same for first in range(0, len(group), 4)]
        self._random.shuffle(batches)
        return iter(batches)


MADE: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: user_loader(),
    "last batch dropped": lambda: user_loader(drop_last=True),
    "shuffled by a generator": lambda: user_loader(shuffle=True, generator=seeded()),
    "weighted": lambda: user_loader(sampler=weighted(seeded())),
    "bucketed": lambda: DataLoader(ITEMS, batch_sampler=Buckets(), collate_fn=padded),  # type: ignore[arg-type]
    "a stream": lambda: DataLoader(Counted(), batch_size=BATCH, collate_fn=padded),
    "a stream, last dropped": lambda: DataLoader(Counted(), batch_size=BATCH, collate_fn=padded, drop_last=True),
}


@pytest.mark.parametrize("name", MADE)
def test_batches_are_those_of_the_plain_loader(name: str) -> None:
    expected = plain(MADE[name](), epochs=3)
    assert drawn(MADE[name], epochs=3, collate=None) == expected


OTHERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: user_loader(shuffle=True),
    "weighted by the seed": lambda: user_loader(sampler=weighted(None)),
}


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in MADE | OTHERS), ("bucketed", 2), ("a stream", 2)]
)
def test_a_loader_continues_at_any_position(name: str, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    make_loader = (MADE | OTHERS)[name]
    whole = drawn(make_loader, epochs=3, collate=None)
    first = loader_of(make_loader, collate=None)
    for done, _ in enumerate(first.batches(epochs=3), start=1):
        if done in (3, 9):
            assert (
                drawn(make_loader, epochs=3, collate=None, position=first.data_position, workers=workers)
                == whole[done:]
            )
    assert "warning" not in capsys.readouterr().err


def test_a_sampler_is_drawn_anew_in_each_epoch_by_the_seed() -> None:
    whole = drawn(lambda: user_loader(shuffle=True), epochs=2)
    assert whole == drawn(lambda: user_loader(shuffle=True), epochs=2)
    first, second = list(chain.from_iterable(whole[:8])), list(chain.from_iterable(whole[8:]))
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second


def test_drawing_an_order_leaves_the_generators_alone() -> None:
    loader = loader_of(lambda: user_loader(sampler=weighted(None)))
    seed_host(3)
    expected = random.random(), torch.rand(()).item()
    seed_host(3)
    list(islice(loader.order.parts(0), 9))
    assert (random.random(), torch.rand(()).item()) == expected


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("data", [Shuffled, Counted, DividedByWorker, lambda: map(sequence, range(SAMPLES))])
def test_no_sample_of_a_stream_is_lost_or_repeated(data: Any, workers: int) -> None:
    batches = drawn(data, epochs=2, workers=workers)
    assert [len(batch) for batch in batches] == [6, 6, 6, 6, 6, 6, 6, 3] * 2
    for epoch in (batches[:8], batches[8:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(SAMPLES))
    assert batches == drawn(data, epochs=2), "workers change nothing"
    assert (batches[:8] != batches[8:]) == (data is Shuffled)


def test_a_second_call_continues_without_reading_again() -> None:
    stream = Counted(10_000)
    loader = loader_of(stream)
    seen = [indices(batch) for _ in range(5) for batch in islice(loader.batches(), 2)]
    assert list(chain.from_iterable(seen)) == list(range(60))
    assert stream.reads < 60 + 30, "what is read beside the batches is for inspection"


def test_the_state_of_a_stream_is_used_if_it_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    loader = loader_of(lambda: Counted(1000))
    list(islice(loader.batches(), 50))
    assert loader.data_position.state == {"next": 300}
    assert not capsys.readouterr().err
    again = loader_of(lambda: Counted(1000), position=loader.data_position)
    assert indices(next(again.batches())) == list(range(300, 306))
    assert (again.data_position.samples, again.data_position.within) == (306, 306)


def test_a_state_that_loses_samples_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    loader = loader_of(lambda: Counted(lost=2))
    list(islice(loader.batches(), 2))
    assert loader.data_position.state is None
    assert "does not continue at the exact next sample (it was tried)" in capsys.readouterr().err
    again = loader_of(lambda: Counted(lost=2), position=loader.data_position)
    assert indices(next(again.batches())) == list(range(12, 18))
    assert "passing over 12 samples" in capsys.readouterr().err


def test_a_stream_that_changed_is_told_after_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    loader = loader_of(Shuffled)
    list(islice(loader.batches(), 2))
    list(islice(loader_of(lambda: Shuffled(buffer=3), position=loader.data_position).batches(), 1))
    assert (
        "warning: the data passed over to resume are not those that the saved run had seen" in capsys.readouterr().err
    )


def test_a_stream_that_differs_each_time_is_told_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    system = random.SystemRandom()
    drawn(lambda: (sequence(system.randrange(10_000)) for _ in range(SAMPLES)), count=1)
    assert "note: a resumed run cannot continue exactly" in capsys.readouterr().err


def test_an_endless_stream_has_no_epochs() -> None:
    def endless() -> Iterator[Any]:
        index = 0
        while True:
            yield sequence(index)
            index += 1

    loader = loader_of(endless)
    assert loader.steps_per_epoch is None
    batches = list(islice(loader.batches(epochs=1), 20))
    assert [batch.epoch for batch in batches] == [0] * 20
    assert (loader.position, loader.data_position.within) == (120, 120)


def test_the_epoch_of_a_batch_and_the_steps_of_an_epoch() -> None:
    for data, steps in ((ITEMS, 8), (lambda: user_loader(drop_last=True), 7), (Shuffled, None)):
        loader = loader_of(data)
        assert loader.steps_per_epoch == steps
        epochs = [batch.epoch for batch in loader.batches(epochs=2)]
        assert epochs == [0] * (steps or 8) + [1] * (steps or 8)


class WholeBatches:
    """Each item is a batch."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        values = torch.arange(8.0 * 2 * 4).reshape(8, 2, 4) + 100 * index
        return {"x": values[:, 0], "y": values[:, 1]}


def test_items_may_be_whole_batches() -> None:
    job = make_job(data=lambda: DataLoader(WholeBatches(), batch_size=None, shuffle=False))  # type: ignore[arg-type]
    loader = open_loader(make_trainer(job, "single,mb=3"), workers=0, position=DataPosition())
    batches = list(islice(loader.batches(), 3))
    assert [[len(piece.data["x"]) for piece in batch.pieces] for batch in batches] == [[3, 3, 2]] * 3
    assert [float(batch.pieces[0].data["x"][0, 0]) for batch in batches] == [0.0, 100.0, 200.0]
    assert (loader.position, loader.data_position.within) == (24, 3)


class Same(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([])


REFUSED: dict[str, tuple[Any, str]] = {
    "one-shot": (map(sequence, range(5)), "can be read only once; give the function that makes it"),
    "splits": ({"train": ITEMS, "test": ITEMS}, "gave a dict with 'train', 'test'; give one of its entries"),
    "batch size": (user_loader(batch_size=4), "with batch_size=4, but global_batch=6 samples make up a step"),
    "by rank": (
        user_loader(sampler=DistributedSampler(ITEMS, num_replicas=2, rank=0)),  # type: ignore[arg-type]
        "a DistributedSampler, which gives each rank its own samples",
    ),
    "nothing": (object(), "which has neither a length and items nor an iterator"),
    "empty": (lambda: iter(()), "has no samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_on_is_refused_by_name(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(JobError, match=reason):
        make_trainer(make(data))


def test_data_that_end_for_good_are_named() -> None:
    class Once:
        def __init__(self) -> None:
            self.left = 12

        def __iter__(self) -> Iterator[Any]:
            while self.left:
                self.left -= 1
                yield sequence(self.left)

    loader = loader_of(Once)
    batches = loader.batches()
    assert [indices(batch) for batch in islice(batches, 2)] == [list(range(11, 5, -1)), list(range(5, -1, -1))]
    with pytest.raises(JobError, match=r"gave no batch to train on in epoch 1.*must start again each time"):
        next(batches)


def test_an_empty_sampler_is_named() -> None:
    with pytest.raises(JobError, match="gave no batch to train on in epoch 0"):
        next(loader_of(lambda: user_loader(sampler=Same())).batches())


def test_a_batch_sampler_may_not_give_more_than_a_step_has() -> None:
    with pytest.raises(JobError, match="batch sampler gave 7 samples, but a step has at most global_batch=6"):
        next(loader_of(lambda: DataLoader(ITEMS, batch_sampler=[list(range(7))])).batches())  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_stream_is_named(workers: int) -> None:
    batches = loader_of(lambda: Failing(), workers=workers).batches()
    assert len(list(islice(batches, 3))) == 3
    with pytest.raises(JobError, match=r"^Job\(data=\.\.\.\) raised ValueError: bad sample\.$"):
        next(batches)


def test_a_run_trains_on_padded_batches_of_any_length() -> None:
    """The weight is a plain number of rows, which differ from batch to batch."""
    data = [{"x": torch.ones(length, 4), "y": torch.ones(length, 4)} for length in (2, 2, 2, 2, 2, 2, 3, 5) * 2]

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(len(sample["x"]) for sample in samples)
        grow = (0, 0, 0, 0)
        rows = [
            {key: torch.nn.functional.pad(v, (*grow[:3], longest - len(v))) for key, v in s.items()} for s in samples
        ]
        return default_collate(rows)

    job = make_job(
        data=data,
        collate=collate,
        sample=lambda n: {"x": torch.ones(n, 2, 4), "y": torch.ones(n, 2, 4)},
        loss=lambda out, batch: ((out - batch["y"]).square().sum(), out.shape[0] * out.shape[1]),
        global_batch=4,
    )
    run = Run(make_trainer(job, "single,mb=2"))
    assert len([run.step(batch).loss for batch in run.batches(epochs=2)]) == 8


HELD = """
import torch
import meshwright as mw
from torch import nn

job = mw.Job(
    model=lambda: nn.Linear(4, 2),
    inputs=lambda batch: (batch,),
    loss=lambda output, batch: (output.sum(), len(output)),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=torch.ones(8, 4),
    global_batch=4,
)
run = mw.setup(job, "single", workers=1)
batches = run.batches()
run.step(next(batches))
print("stepped")
"""


def test_loading_processes_end_with_a_script_that_holds_its_batches() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "stepped\n"), done.stderr
