"""A global batch is cut so that every sample is used once, whoever computes it."""

from itertools import product

import pytest
import torch

from meshwright.assemble.batch import Batch, MicroBatch, Share, Span, assemble, has_stand_ins, micro_steps, spans
from meshwright.assemble.batch import part as part_of
from meshwright.describe.samples import Cutter
from meshwright.errors import JobError
from minimal import make_job

CASES = list(product(range(1, 26), range(1, 8), (None, 1, 2, 3, 5, 8)))


def all_spans(samples: int, ranks: int, micro_batch: int | None) -> list[tuple[tuple[int, int], ...]]:
    """One row a rank: (first, length) of each micro-step."""
    return [tuple((s.first, s.length) for s in spans(samples, ranks, rank, micro_batch)) for rank in range(ranks)]


def test_spans_partition_the_batch() -> None:
    for case in CASES:
        indices = [i for row in all_spans(*case) for first, length in row for i in range(first, first + length)]
        assert sorted(indices) == list(range(case[0])), case


def test_ranks_take_the_same_number_of_micro_steps() -> None:
    for case in CASES:
        assert {len(row) for row in all_spans(*case)} == {micro_steps(*case)}, case


def test_micro_batches_are_not_larger_than_asked() -> None:
    for samples, ranks, limit in CASES:
        longest = max(length for row in all_spans(samples, ranks, limit) for _, length in row)
        assert longest <= (limit or -(-samples // ranks)), (samples, ranks, limit)


def test_no_more_micro_steps_than_needed() -> None:
    for samples, ranks, limit in CASES:
        steps = micro_steps(samples, ranks, limit)
        assert steps == 1 or (steps - 1) * ranks * (limit or samples) < samples, (samples, ranks, limit)


def test_work_is_shared_evenly() -> None:
    for case in CASES:
        for step in zip(*all_spans(*case), strict=True):
            lengths = [length for _, length in step]
            assert max(lengths) - min(lengths) <= 1, case


def test_stand_ins_are_foretold() -> None:
    for case in CASES:
        assert has_stand_ins(*case) == any(not length for row in all_spans(*case) for _, length in row), case


def test_a_micro_step_is_consecutive() -> None:
    """So what meets in one BatchNorm does not depend on the ranks."""
    for case in CASES:
        end = 0
        for step in zip(*all_spans(*case), strict=True):
            for first, length in step:
                assert first == end, case
                end += length


def nested(samples: int) -> dict[str, object]:
    """A batch with tensors at several depths, and things that are not cut."""
    return {
        "x": torch.arange(samples * 2).view(samples, 2),
        "more": [torch.arange(samples) + 100, (torch.arange(samples).float(), "name")],
        "table": torch.arange(97),
        "scale": torch.tensor(3.0),
        "number": 4,
    }


def part(data: object, ranks: int, rank: int, limit: int | None, sample: object = nested) -> Batch:
    share = Share(ranks=ranks, rank=rank, micro_batch=limit)
    return part_of(data, share, Cutter(make_job(sample=sample)), nominal=8)


@pytest.mark.parametrize(
    ("samples", "ranks", "limit"), [(1, 1, None), (8, 2, 2), (7, 3, 1), (10, 4, 2), (2, 4, None), (5, 3, 2)]
)
def test_parts_give_back_the_samples(samples: int, ranks: int, limit: int | None) -> None:
    data = nested(samples)
    seen: list[tuple[int, int]] = []
    for rank in range(ranks):
        batch = part(data, ranks, rank, limit)
        assert batch.samples == samples
        assert batch.spans == spans(samples, ranks, rank, limit)
        for piece in batch.pieces:
            length = piece.span.length
            assert len(piece.data["x"]) == max(1, length)
            assert torch.equal(piece.data["table"], data["table"])
            assert piece.data["scale"] is data["scale"]
            assert (piece.data["number"], piece.data["more"][1][1]) == (4, "name")
            if length:
                wanted = slice(piece.span.first, piece.span.first + length)
                assert torch.equal(piece.data["x"], data["x"][wanted])
                assert torch.equal(piece.data["more"][0], data["more"][0][wanted])
                assert torch.equal(piece.data["more"][1][0], data["more"][1][0][wanted])
                seen += [(int(row[0]) // 2, rank) for row in piece.data["x"]]
    assert sorted(index for index, _ in seen) == list(range(samples))


def test_a_tensor_that_is_not_of_samples_stays_whole() -> None:
    """Also where it happens to have as many rows as one rank, or all of them, have samples."""

    def sample(samples: int) -> dict[str, torch.Tensor]:
        return {"x": torch.arange(samples), "table": torch.arange(4), "other": torch.arange(8)}

    for rank in range(2):
        for piece in part(sample(8), 2, rank, 1, sample).pieces:
            assert torch.equal(piece.data["table"], torch.arange(4))
            assert torch.equal(piece.data["other"], torch.arange(8))


def test_a_whole_batch_on_one_rank_is_not_copied() -> None:
    data = nested(4)
    (piece,) = part(data, 1, 0, None).pieces
    assert piece.data is data


def test_stand_in() -> None:
    (piece,) = part({"x": torch.arange(2)}, 4, 3, None, lambda samples: {"x": torch.arange(samples)}).pieces
    assert piece.span.length == 0
    assert len(piece.data["x"]) == 1


def test_to_device_moves_tensors_only() -> None:
    piece = MicroBatch(data={"x": torch.arange(2), "name": "a"}, span=Span(0, 2))
    moved = Batch(rounds=((piece,),), samples=2).to(torch.device("meta"))
    assert moved.pieces[0].data["x"].is_meta
    assert moved.pieces[0].data["name"] == "a"
    assert moved.samples == 2


def packed(samples: int) -> dict[str, torch.Tensor]:
    """All tokens in one row, of another length for each sample."""
    lengths = torch.randint(1, 9, (samples,))
    return {"tokens": torch.arange(int(lengths.sum())), "offsets": torch.cat([torch.zeros(1), lengths.cumsum(0)])}


def test_what_cannot_be_cut_is_refused_only_where_it_must_be_cut() -> None:
    (piece,) = part(packed(8), 1, 0, None, packed).pieces
    assert (piece.span, piece.regular) == (Span(0, 8), False)
    for ranks, limit in ((2, None), (1, 4)):
        with pytest.raises(JobError, match=r'batch\["tokens"\] .* cannot be cut into samples.*Job\(split=...\)'):
            part(packed(8), ranks, 0, limit, packed)


def test_a_batch_without_samples() -> None:
    with pytest.raises(JobError, match="without samples"):
        part({"x": torch.arange(0)}, 1, 0, None, lambda samples: {"x": torch.arange(samples)})


def test_a_part_is_put_together_from_micro_batches() -> None:
    rounds = Share(ranks=2, rank=1, micro_batch=2).rounds(8)
    batch = assemble(["c d", "g h"], rounds, samples=8)
    assert [(piece.data, piece.span) for piece in batch.pieces] == [("c d", Span(2, 2)), ("g h", Span(6, 2))]
