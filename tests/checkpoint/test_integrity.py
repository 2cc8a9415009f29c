"""Boxes that do not make up whole tensors are found from the manifest alone."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_samples import save_in_boxes
from meshwright.checkpoint.integrity import find_gaps, inspect
from meshwright.checkpoint.manifest import Chunk, Entry, File, Manifest, RunState, read_manifest


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return read_manifest(save_in_boxes(tmp_path / "c", {"model/a": torch.ones(4, 2), "model/b": torch.ones(3)}))


def with_chunks(manifest: Manifest, *chunks: Chunk) -> Manifest:
    entry = replace(manifest.tensors["model/a"], chunks=chunks)
    return replace(manifest, tensors={**manifest.tensors, "model/a": entry})


def test_a_sound_one(manifest: Manifest, tmp_path: Path) -> None:
    assert list(find_gaps(manifest)) == []
    assert inspect(tmp_path / "c", manifest) == []


def test_a_missing_box(manifest: Manifest) -> None:
    first, _ = manifest.tensors["model/a"].chunks
    (damage,) = find_gaps(with_chunks(manifest, first))
    assert str(damage) == "checkpoint.json lists boxes that do not cover the tensor: model/a"


def test_boxes_that_overlap(manifest: Manifest) -> None:
    first, second = manifest.tensors["model/a"].chunks
    assert len(list(find_gaps(with_chunks(manifest, first, replace(second, offsets=(1, 0)))))) == 1


@pytest.mark.parametrize(
    "change", [{"offsets": (3, 0)}, {"offsets": (-1, 0)}, {"at": 10**6}, {"at": -1}, {"sizes": (2,)}]
)
def test_a_box_outside(manifest: Manifest, change: dict[str, int]) -> None:
    first, second = manifest.tensors["model/a"].chunks
    (damage,) = find_gaps(with_chunks(manifest, first, replace(second, **change)))
    assert "holds" not in str(damage) and "a box that it cannot hold: model/a" in str(damage)


def test_everything_wrong_is_listed_once(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "c" / "stranger").touch()
    file = tmp_path / "c" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert [damage.file for damage in inspect(tmp_path / "c", manifest)] == ["stranger", "rank-00000.safetensors"]


def boxes(shape: tuple[int, ...], parts: int) -> tuple[Chunk, ...]:
    """A tensor cut into so many rows, each in a file of its own."""
    rest = shape[1:]
    return tuple(
        Chunk(offsets=(row, *(0 for _ in rest)), sizes=(1, *rest), file="f", at=0, sha256="0" * 64)
        for row in range(parts)
    )


def test_twenty_thousand_boxes_are_compared_in_less_than_their_square() -> None:
    """The square of them would be 400 million comparisons, and as many bytes at once."""
    count = 20_000
    whole = Entry(dtype="float32", shape=(count, 2), chunks=boxes((count, 2), count))
    run_state = RunState(step=0, samples=0, seed=0, strategy="single", ranks=1)
    manifest = Manifest(run_state=run_state, tensors={"a": whole}, files={"f": File(bytes=8 * count, sha256="0" * 64)})
    tracemalloc.start()
    assert list(find_gaps(manifest)) == []
    doubled = replace(whole, chunks=(whole.chunks[1], *whole.chunks[1:]))
    assert len(list(find_gaps(replace(manifest, tensors={"a": doubled})))) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * 2**20


@pytest.mark.parametrize("cut", [(0, 1), (1, 0), (2, 2)])
def test_boxes_along_two_dims(cut: tuple[int, int]) -> None:
    """Four quarters that make a whole, and four of as many elements that do not."""
    quarters = [
        Chunk(offsets=(row, column), sizes=(2, 2), file="f", at=0, sha256="0" * 64)
        for row in (0, 2)
        for column in (0, 2)
    ]
    whole = Entry(dtype="float32", shape=(4, 4), chunks=tuple(quarters))
    run_state = RunState(step=0, samples=0, seed=0, strategy="single", ranks=1)
    manifest = Manifest(run_state=run_state, tensors={"a": whole}, files={"f": File(bytes=99, sha256="0" * 64)})
    assert list(find_gaps(manifest)) == []
    moved = replace(whole, chunks=(replace(quarters[0], offsets=cut), *quarters[1:]))
    assert len(list(find_gaps(replace(manifest, tensors={"a": moved})))) == 1
