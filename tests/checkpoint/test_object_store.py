"""Checkpoints in object storage: published last, checked on load, copied to the node, damage found by name."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint.folder import CHECKPOINTS, list_checkpoints
from meshwright.checkpoint.manifest import DIGESTS, MANIFEST
from meshwright.checkpoint.object_store import ObjectStore
from meshwright.errors import BadInput, CheckpointError, OutputError
from meshwright.runtime.checkpoints import Checkpoints, fetch_newest
from meshwright.runtime.train import train
from minimal import make_job, sample

FILE = "rank-00000.safetensors"


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    batch = sample(count)
    return [{key: value[index] for key, value in batch.items()} for index in range(count)]


def go(out: Path, store: ObjectStore, steps: int, *, resume: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Train as the command does, in this process; returns the weights."""
    with mw.setup(make_job(data=rows(20)), "single", device="cpu") as run:
        if resume:
            fetch_newest(store, out, run.world)
        checkpoints = Checkpoints(run, out, every=2, store=store, **options)
        if resume:
            checkpoints.resume()
        train(run, steps=steps, out=out, checkpoints=checkpoints, progress=False)
        return run.state()


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"{request.param}://{tmp_path}/bucket/run")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_goes_on_from_the_store(store: ObjectStore, tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", ObjectStore(f"file://{tmp_path}/other"), 6)
    go(tmp_path / "first", store, 4)
    assert store.complete() == ["step-00000002", "step-00000004"]
    assert store.files_of("step-00000004") == {FILE, MANIFEST, DIGESTS}
    assert same(go(tmp_path / "second", store, 6, resume=True), whole)  # a node that has nothing
    assert store.complete()[-1] == "step-00000006"


def test_the_nodes_copy_is_used(store: ObjectStore, tmp_path: Path) -> None:
    go(tmp_path / "run", store, 4)
    with patch.object(store, "get", wraps=store.get) as got:
        go(tmp_path / "run", store, 6, resume=True)
    assert {call.args[0] for call in got.call_args_list} == {MANIFEST, DIGESTS}


def test_a_damaged_copy_is_fetched_again(store: ObjectStore, tmp_path: Path) -> None:
    go(tmp_path / "run", store, 4)
    spoil(list_checkpoints(tmp_path / "run" / CHECKPOINTS)[-1] / FILE)
    with patch.object(store, "get", wraps=store.get) as got:
        go(tmp_path / "run", store, 6, resume=True)
    assert FILE in {call.args[0] for call in got.call_args_list}


def test_an_incomplete_checkpoint_is_none(store: ObjectStore, tmp_path: Path) -> None:
    """As if the run had been killed before the last object was written."""
    go(tmp_path / "run", store, 4)
    store._files.rm_file(f"{store._root}/step-00000004/{DIGESTS}")
    assert store.complete() == ["step-00000002"]
    shutil.rmtree(tmp_path / "run")
    fetch_newest(store, tmp_path / "run", mw.setup(make_job(data=rows(20)), "single", device="cpu").world)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / CHECKPOINTS)] == ["step-00000002"]
    store.clear()
    assert store._steps() == ["step-00000002"]


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest"])
def test_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    store = ObjectStore(f"file://{tmp_path}/bucket")
    go(tmp_path / "run", store, 4)
    newest = tmp_path / "bucket" / "step-00000004"
    if damage == "missing":
        (newest / FILE).unlink()
    else:
        spoil(newest / (FILE if damage == "changed" else MANIFEST))
    capsys.readouterr()
    go(tmp_path / "fresh", store, 3, resume=True)
    told = capsys.readouterr().err
    assert f"{store.url}/step-00000004" in told and "Trying the one before." in told
    assert (MANIFEST if damage == "manifest" else FILE) in told
    assert "resumed at step 2" in told


def test_nothing_sound(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/bucket")
    go(tmp_path / "run", store, 2)
    spoil(tmp_path / "bucket" / "step-00000002" / FILE)
    with pytest.raises(CheckpointError, match="None of the 1 checkpoints in file://"):
        go(tmp_path / "fresh", store, 3, resume=True)


def test_retention(store: ObjectStore, tmp_path: Path) -> None:
    go(tmp_path / "run", store, 8, keep=1, keep_every=4)
    assert store.complete() == ["step-00000004", "step-00000008"]
    assert [path.name for path in list_checkpoints(tmp_path / "run" / CHECKPOINTS)] == store.complete()


def test_a_store_that_fails_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ObjectStore(f"file://{tmp_path}/bucket")
    with patch.object(store._files, "put_file", side_effect=PermissionError("403 Forbidden")):
        go(tmp_path / "run", store, 2)
    assert "step 2 was not saved" in capsys.readouterr().err
    assert store.complete() == []
    assert list_checkpoints(tmp_path / "run" / CHECKPOINTS) == []


def test_wrong_urls(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a URL"):
        ObjectStore("bucket/run")
    with pytest.raises(BadInput, match="cannot be opened"):
        ObjectStore("nonsense://bucket")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        ObjectStore(f"file://{tmp_path}/file/run").check()


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.unlink()  # it may be linked
    path.write_bytes(content)
