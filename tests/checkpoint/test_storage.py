"""The files of a checkpoint: safetensors that anybody opens, digests that anybody checks."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import meshwright as mw
from checkpoint_samples import save_in_boxes
from meshwright.checkpoint.integrity import inspect
from meshwright.checkpoint.manifest import DIGESTS, MANIFEST, read_manifest
from meshwright.checkpoint.storage import NAMES, header_of
from meshwright.checkpoint.whole_tensors import WholeTensors
from meshwright.errors import CheckpointError
from minimal import make_job, sample

DTYPES = [dtype for dtype in NAMES if dtype not in (torch.uint16, torch.uint32, torch.uint64)]


def bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of any kind, NaNs and infinities among them."""
    if dtype == torch.bool:
        return torch.arange(count) % 3 == 0
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


@pytest.fixture
def run() -> Iterator[mw.Run]:
    with mw.setup(make_job(), "single", device="cpu") as made:
        made.step(sample(8))
        yield made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Both as safetensors opens the file and as we put it together."""
    tensors = {"model/a": bits(12, dtype).view(3, 4), "model/b": bits(5, dtype, seed=1), "model/c": bits(1, dtype)[0]}
    folder = save_in_boxes(tmp_path / "saved", tensors, boxes=1)
    whole = WholeTensors(folder)
    with safe_open(folder / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert same_bits(file.get_tensor(name), tensor)
            assert same_bits(whole.read(name), tensor)


def test_boxes_go_by_where_they_begin(tmp_path: Path) -> None:
    folder = save_in_boxes(tmp_path / "saved", {"model/a": torch.arange(10.0).view(5, 2)}, boxes=2)
    with safe_open(folder / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == {"model/a@0,0", "model/a@3,0"}
        assert file.get_tensor("model/a@3,0").tolist() == [[6.0, 7.0], [8.0, 9.0]]
    assert torch.equal(WholeTensors(folder).read("model/a"), torch.arange(10.0).view(5, 2))


def test_every_tensor_begins_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    """Or it could not be mapped."""
    tensors = {f"model/{index}": bits(3, dtype) for index, dtype in enumerate(DTYPES)}
    manifest = read_manifest(save_in_boxes(tmp_path / "saved", tensors, boxes=1))
    for entry in manifest.tensors.values():
        assert all(chunk.at % entry.torch_dtype.itemsize == 0 for chunk in entry.chunks)


EMPTY = torch.empty(0, 3)


@pytest.mark.parametrize(
    "tensors",
    [
        {"model/a": EMPTY},
        {"model/a": torch.ones(2), "model/b": EMPTY},
        {"model/a": EMPTY, "model/b": torch.ones(2)},
        {"model/a": torch.ones(2), "model/b": EMPTY.double()},
        {"model/a": torch.ones(2), "model/b": EMPTY, "model/c": EMPTY.long(), "model/d": torch.ones(3).long()},
    ],
)
def test_tensors_without_numbers(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """They take no bytes, so others lie where they do."""
    folder = save_in_boxes(tmp_path / "saved", tensors)
    manifest = read_manifest(folder)
    assert inspect(folder, manifest) == []
    assert all(same_bits(WholeTensors(folder).read(name), tensor) for name, tensor in tensors.items())


def test_views_of_any_stride(tmp_path: Path) -> None:
    """The file holds what the view shows, and not what lies under it."""
    under = torch.arange(24.0).view(4, 6)
    tensors = {
        "model/a": under.t(),
        "model/b": under[:, 1:3],
        "model/c": under[::2],
        "model/d": torch.ones(1).expand(3),
    }
    folder = save_in_boxes(tmp_path / "saved", tensors, boxes=1)
    with safe_open(folder / "rank-00000.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_a_dtype_that_safetensors_does_not_know_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"model/a has dtype torch\.complex128"):
        header_of([("model/a", torch.complex128, (2,))])


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum")
def test_sha256sum_checks_it(run: mw.Run, tmp_path: Path) -> None:
    run.save(tmp_path / "saved")
    command = ["sha256sum", "--check", "--strict", DIGESTS]
    assert subprocess.run(command, cwd=tmp_path / "saved", capture_output=True).returncode == 0
    with (tmp_path / "saved" / MANIFEST).open("a") as file:
        file.write(" ")
    assert subprocess.run(command, cwd=tmp_path / "saved", capture_output=True).returncode == 1


def test_a_run_as_anybody_reads_it(run: mw.Run, tmp_path: Path) -> None:
    """With JSON and safetensors alone."""
    run.save(tmp_path / "saved")
    manifest = json.loads((tmp_path / "saved" / MANIFEST).read_text(), parse_constant=pytest.fail)
    with safe_open(tmp_path / "saved" / "rank-00000.safetensors", "pt") as file:
        for name, tensor in run.state().items():
            assert torch.equal(file.get_tensor(f"model/{name}"), tensor)
        assert set(file.keys()) == set(manifest["tensors"])
    assert manifest["step"] == 1


def test_what_a_killed_run_left_is_not_taken_for_ours(run: mw.Run, tmp_path: Path) -> None:
    """It had more ranks."""
    left = tmp_path / ".saved.part"
    left.mkdir()
    (left / "rank-00001.safetensors").write_bytes(b"left behind")
    run.save(tmp_path / "saved")
    assert inspect(tmp_path / "saved", read_manifest(tmp_path / "saved")) == []
    run.load(tmp_path / "saved")
