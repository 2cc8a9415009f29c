"""What a pipeline takes of a batch: every sample once, micro-batches of one size, the same rounds on all ranks."""

from functools import cache
from itertools import product

import torch

from meshwright.assemble.batch import MicroBatch, Share, part
from meshwright.describe.samples import Cutter
from minimal import make_job

CASES = [(samples, ranks, count) for samples, ranks, count in product(range(1, 28), (1, 2, 3, 4), (1, 2, 3, 4, 8))]


def numbered(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(samples), "table": torch.arange(97)}


CUTTER = Cutter(make_job(sample=numbered))


@cache
def all_rounds(samples: int, ranks: int, count: int) -> list[tuple[tuple[MicroBatch, ...], ...]]:
    """One row a rank."""
    shares = [Share(ranks=ranks, rank=rank, pipelined=count) for rank in range(ranks)]
    return [part(numbered(samples), share, CUTTER, nominal=8).rounds for share in shares]


def test_every_sample_is_taken_once() -> None:
    for case in CASES:
        pieces = [piece for row in all_rounds(*case) for round_ in row for piece in round_ if piece.span.length]
        taken = [int(sample) for piece in pieces for sample in piece.data["x"]]
        assert sorted(taken) == list(range(case[0])), case


def test_a_span_says_which_samples() -> None:
    for case in CASES:
        for row in all_rounds(*case):
            for piece in (piece for round_ in row for piece in round_ if piece.span.length):
                wanted = range(piece.span.first, piece.span.first + piece.span.length)
                assert piece.data["x"].tolist() == list(wanted), case
                assert len(piece.data["table"]) == 97


def test_all_ranks_take_the_same_rounds() -> None:
    """Otherwise one would wait for another: each round is a schedule, and each micro-batch a gather."""
    for case in CASES:
        shapes = {tuple(len(round_) for round_ in row) for row in all_rounds(*case)}
        assert len(shapes) == 1, case
        assert all(length == case[2] for length in shapes.pop()), case


def test_micro_batches_of_a_round_are_of_one_size() -> None:
    for case in CASES:
        for row in all_rounds(*case):
            for round_ in row:
                assert len({len(piece.data["x"]) for piece in round_}) == 1, case


def test_no_more_than_two_rounds() -> None:
    for samples, ranks, count in CASES:
        for row in all_rounds(samples, ranks, count):
            assert 1 <= len(row) <= 2, (samples, ranks, count)
            if samples % (ranks * count) == 0:
                assert len(row) == 1, (samples, ranks, count)


def test_stand_ins_count_nothing() -> None:
    for case in CASES:
        for row in all_rounds(*case):
            for piece in (piece for round_ in row for piece in round_):
                assert len(piece.data["x"]) == max(1, piece.span.length), case


def test_fewer_samples_than_micro_batches() -> None:
    (row,) = all_rounds(3, 1, 8)
    assert [[piece.span.length for piece in round_] for round_ in row] == [[1, 1, 1, 0, 0, 0, 0, 0]]


def test_a_remainder_follows_as_single_samples() -> None:
    (row,) = all_rounds(11, 1, 4)
    assert [[piece.span.length for piece in round_] for round_ in row] == [[2] * 4, [1, 1, 1, 0]]
    first, second = all_rounds(9, 2, 2)
    assert [[piece.span.length for piece in round_] for round_ in first] == [[2, 2], [1, 0]]
    assert [[piece.span.length for piece in round_] for round_ in second] == [[2, 2], [0, 0]]


def test_a_single_micro_batch_is_all_that_a_rank_has() -> None:
    """BatchNorm under `layers` must see the samples of a step together, also where ranks have unlike numbers."""
    for samples, ranks in product(range(1, 20), (1, 2, 3, 4)):
        rows = all_rounds(samples, ranks, 1)
        assert all(len(row) == 1 for row in rows)
        lengths = [row[0][0].span.length for row in rows]
        assert sum(lengths) == samples
        assert max(lengths) - min(lengths) <= 1
