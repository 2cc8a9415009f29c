"""Boxes that do not make up whole tensors are found from the manifest alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_samples import save_in_boxes
from meshwright.checkpoint.inspection import find_gaps, inspect
from meshwright.checkpoint.manifest import Chunk, Manifest, read_manifest


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
    assert str(damage) == "checkpoint.json lists boxes that do not make up the whole: model/a"


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
