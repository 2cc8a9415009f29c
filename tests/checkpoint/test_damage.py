"""Every damage is found and named, whatever it hits; a checkpoint that is refused touches nothing of a run."""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

import checkpoint_programs as programs
import meshwright as mw
from checkpoint_jobs import facts_of
from meshwright.checkpoint.dcp_planner import PartsSavePlanner
from meshwright.checkpoint.integrity import inspect
from meshwright.checkpoint.manifest import DIGESTS, MANIFEST, digest_line, digest_of_file, read_manifest
from meshwright.checkpoint.parts import HeldParts, Part
from meshwright.checkpoint.state import snapshot
from meshwright.checkpoint.storage import Writer
from meshwright.errors import CheckpointError
from minimal import make_job, make_trainer, sample
from rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DRAWS = 20
"""Damages of each kind."""
RANKS = 3


@pytest.fixture(scope="module")
def run() -> mw.Run:
    """In one process without a process group, so that ranks have nothing to tell each other either."""
    job = make_job(
        optimizer=lambda params: AdamW(params, lr=1e-3), schedule=lambda optimizer: StepLR(optimizer, 2, gamma=0.5)
    )
    return mw.Run(make_trainer(job))


@pytest.fixture(scope="module")
def saved(run: mw.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run, in files of several ranks; afterwards the run goes on."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        run.step(sample(8, seed=step))
        save_as_ranks(run, folder / str(step))
    run.step(sample(8, seed=3))
    return folder


def save_as_ranks(run: mw.Run, folder: Path) -> None:
    """What several ranks would write that have the tensors in shards."""
    names = [name for name, _ in run.trainer.optimized.named()]
    whole = snapshot(run.trainer, run.data_position, [names])
    planners, plans = [], []
    for rank in range(RANKS):
        planner = PartsSavePlanner()
        planner.set_up_planner({name: shard for name, laid in whole.state.items() if (shard := shard_of(laid, rank))})
        planners.append(planner)
        plans.append(planner.create_local_plan())
    plans, metadata = PartsSavePlanner().create_global_plan(plans)
    folder.mkdir()
    writers = [Writer(folder, rank, whole.run_state, lambda done: None) for rank in range(RANKS)]
    results = [w.write_data(plan, p).wait() for w, plan, p in zip(writers, plans, planners, strict=True)]
    writers[0].finish(metadata, results)


def shard_of(laid: HeldParts, rank: int) -> HeldParts | None:
    (part,) = laid.parts
    rows = part.tensor.shape[0] if laid.shape else 1
    size = -(-rows // RANKS)
    if rank * size >= rows:
        return None
    box = part.tensor[rank * size : (rank + 1) * size] if laid.shape else part.tensor
    return HeldParts(laid.shape, laid.dtype, (Part((rank * size, *part.offsets[1:]) if laid.shape else (), box),))


@pytest.fixture
def spoil(saved: Path, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A new copy of the first checkpoint each time."""
    copies = iter(range(10**6))
    yield lambda: Path(shutil.copytree(saved / "1", tmp_path / str(next(copies))))


def flip_bit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def change_byte(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    content[at] = draw.choice([value for value in range(256) if value != content[at]])
    path.write_bytes(content)


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(1, path.stat().st_size))


def empty(path: Path, draw: random.Random) -> None:
    os.truncate(path, 0)


def append(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.choice([b"\0", b"\n", b" ", draw.randbytes(100)]))


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def swap_ranges(path: Path, draw: random.Random) -> None:
    before = content = path.read_bytes()
    while content == before:
        length = draw.randrange(1, len(content) // 2)
        first = draw.randrange(len(content) - 2 * length + 1)
        second = draw.randrange(first + length, len(content) - length + 1)
        one, other = content[first : first + length], content[second : second + length]
        between, rest = content[first + length : second], content[second + length :]
        content = content[:first] + other + between + one + rest
    path.write_bytes(content)


def swap_files(path: Path, draw: random.Random) -> str:
    other = draw.choice([one for one in sorted(path.parent.iterdir()) if one != path])
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)
    return other.name


def link_elsewhere(path: Path, draw: random.Random) -> None:
    """To the same bytes: they may change without our knowing."""
    elsewhere = path.parent.with_name(f"{path.parent.name}-{path.name}")
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def make_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def fill_with_zeros(path: Path, draw: random.Random) -> None:
    """As file systems do with blocks that were never written."""
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content) - 8)
    while not any(content[start:]):
        start = draw.randrange(start)
    content[start:] = bytes(len(content) - start)
    path.write_bytes(content)


DAMAGES = [
    *(flip_bit, change_byte, truncate, empty, append, delete, swap_ranges, swap_files, link_elsewhere, make_folder),
    fill_with_zeros,
]


def found_in(folder: Path) -> str:
    """What the check says; empty if nothing."""
    try:
        return "\n".join(str(damage) for damage in inspect(folder, read_manifest(folder)))
    except CheckpointError as error:
        return str(error)


def fingerprint(run: mw.Run) -> str:
    """Of all that a load would change, bit by bit, this process's generators included."""
    trainer = run.trainer
    tensors = [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]  # type: ignore[index, union-attr]
    tensors += [held.tensor for held in trainer.engine.held()]
    for parameter in trainer.optimized:
        tensors += [value for _, value in sorted(trainer.optimizer.state[parameter].items())]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    values = [trainer.steps, run.position, groups, trainer.schedule and trainer.schedule.state_dict()]
    digest = hashlib.sha256(repr((values, random.getstate())).encode())
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_refused(run: mw.Run, folder: Path, *damaged: str) -> str | None:
    """What is wrong with how a damage was dealt with; one of the damaged files must be named."""
    if not any(name in found_in(folder) for name in damaged):
        return f"the check says {found_in(folder)!r}"
    before = fingerprint(run)
    try:
        run.load(folder)
    except CheckpointError as error:
        if not any(name in str(error) for name in damaged):
            return f"load says {error}"
        return None if fingerprint(run) == before else "the run was touched"
    return "it was loaded"


def test_a_sound_one(run: mw.Run, spoil: Callable[[], Path]) -> None:
    folder = spoil()
    assert sorted(path.name for path in folder.iterdir()) == [
        *(MANIFEST, DIGESTS),
        *(f"rank-{rank:05d}.safetensors" for rank in range(RANKS)),
    ]
    assert found_in(folder) == ""
    before = fingerprint(run)
    run.load(folder)
    assert fingerprint(run) != before


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_found_and_named(run: mw.Run, spoil: Callable[[], Path], damage: Any) -> None:
    draw = random.Random(damage.__name__)
    wrong = []
    for number in range(DRAWS):
        folder = spoil()
        # Every file in turn, so that none is left out.
        path = sorted(folder.iterdir())[number % (RANKS + 2)]
        other = damage(path, draw) or path.name
        if problem := check_refused(run, folder, path.name, other):
            wrong.append(f"{path.name}: {problem}")
        shutil.rmtree(folder)
    assert wrong == []


def test_a_file_of_another_checkpoint_of_the_run(run: mw.Run, saved: Path, spoil: Callable[[], Path]) -> None:
    wrong = []
    for path in sorted((saved / "2").iterdir()):
        folder = spoil()
        shutil.copy(path, folder / path.name)
        if problem := check_refused(run, folder, path.name):
            wrong.append(f"{path.name}: {problem}")
    assert wrong == []


@pytest.mark.parametrize(
    "name",
    ["rank-00003.safetensors", ".metadata", "__0_0.distcp", "model.pt", ".hidden", "checkpoint.json.bak", "a folder"],
)
def test_foreign_files(run: mw.Run, spoil: Callable[[], Path], name: str) -> None:
    folder = spoil()
    if name == "a folder":
        (folder / name).mkdir()
    else:
        shutil.copy(folder / "rank-00000.safetensors", folder / name)
    assert check_refused(run, folder, name) is None


def test_tensors_that_are_hurt_are_named(spoil: Callable[[], Path]) -> None:
    folder = spoil()
    manifest = read_manifest(folder)
    chunk = manifest.tensors["model/2.weight"].chunks[1]
    content = bytearray((folder / chunk.file).read_bytes())
    content[chunk.at] ^= 1
    (folder / chunk.file).write_bytes(content)
    assert found_in(folder) == f"{chunk.file} is not what was written: model/2.weight"


def test_a_disk_that_fails_is_a_bad_checkpoint(
    run: mw.Run, spoil: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an error of our own, which other ranks would not hear of."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error", "the/file")

    monkeypatch.setattr("meshwright.checkpoint.integrity._sha256", fail)
    before = fingerprint(run)
    with pytest.raises(CheckpointError, match="the/file cannot be read: Input/output error"):
        run.load(spoil())
    assert fingerprint(run) == before


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def as_pickle(bomb: Bomb) -> bytes:
    return pickle.dumps({"state_dict": bomb})


def as_torch(bomb: Bomb) -> bytes:
    content = BytesIO()
    torch.save({"state_dict": bomb}, content)
    return content.getvalue()


@pytest.mark.parametrize("kind", [as_pickle, as_torch])
def test_the_bomb_works(tmp_path: Path, kind: Callable[[Bomb], bytes]) -> None:
    content = kind(Bomb(tmp_path / "fired"))
    if kind is as_pickle:
        pickle.loads(content)
    else:
        torch.load(BytesIO(content), weights_only=False)
    assert (tmp_path / "fired").exists()


@pytest.mark.parametrize("kind", [as_pickle, as_torch])
@pytest.mark.parametrize("name", [MANIFEST, DIGESTS, "rank-00000.safetensors", ".metadata", "model.pt"])
def test_a_pickle_is_refused_and_not_run(
    run: mw.Run, spoil: Callable[[], Path], tmp_path: Path, kind: Callable[[Bomb], bytes], name: str
) -> None:
    folder = spoil()
    (folder / name).write_bytes(kind(Bomb(tmp_path / "fired")))
    assert check_refused(run, folder, name) is None
    assert not (tmp_path / "fired").exists()


def test_a_pickle_with_forged_digests_is_not_run(run: mw.Run, spoil: Callable[[], Path], tmp_path: Path) -> None:
    """Whoever can write one file can write them all: then it is numbers, and wrong ones."""
    folder, name = spoil(), "rank-00000.safetensors"
    document, chunks = json.loads((folder / MANIFEST).read_text()), read_manifest(folder).chunks_in(name)
    size = document["files"][name]["bytes"]
    bomb = as_pickle(Bomb(tmp_path / "fired"))
    content = (bomb * (size // len(bomb) + 1))[:size]
    (folder / name).write_bytes(content)
    digests = [sha256(content[chunk.at : chunk.at + entry.bytes_of(chunk)]) for _, entry, chunk in chunks]
    for (tensor, _, chunk), digest in zip(chunks, digests, strict=True):
        for forged in document["tensors"][tensor]["chunks"]:
            if (forged["file"], forged["at"]) == (name, chunk.at):
                forged["sha256"] = digest
    document["files"][name]["sha256"] = digest_of_file(sha256(content[: chunks[0][2].at]), digests)
    text = json.dumps(document)
    (folder / MANIFEST).write_text(text)
    (folder / DIGESTS).write_text(digest_line(text))
    assert found_in(folder) == ""
    with suppress(Exception):  # generators refuse a state that is none
        run.load(folder)
    assert not (tmp_path / "fired").exists()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_nothing_is_unpickled(run: mw.Run, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    for name in (
        *("pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "_pickle.load", "_pickle.loads"),
        *("_pickle.Unpickler", "torch.load", "torch.serialization.load", "torch.jit.load", "numpy.load"),
        *("torch.distributed.distributed_c10d._unpickler", "torch.storage._load_from_bytes", "marshal.loads"),
    ):
        monkeypatch.setattr(name, fail)
    before = fingerprint(run)
    run.load(saved / "1")
    assert run.trainer.steps == 1
    run.load(saved / "2")
    assert run.trainer.steps == 2
    assert fingerprint(run) != before


@pytest.mark.slow
def test_ranks_refuse_together(two_ranks: RankPool, tmp_path: Path) -> None:
    """What one of them sees, all of them say; and they go on together."""
    setting = programs.Setup("transformer", facts_of("transformer"), "fsdp")
    two_ranks(programs.train_and_save, setting, str(tmp_path / "sound"))
    folders = []
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", MANIFEST, DIGESTS):
        folders.append(shutil.copytree(tmp_path / "sound", tmp_path / name))
        flip_bit(folders[-1] / name, random.Random(0))
    ours, theirs = two_ranks(programs.refuse, setting, [str(folder) for folder in folders])
    assert ours == theirs
    for folder, refusal in zip(folders, ours, strict=True):
        assert refusal.startswith("DamagedCheckpoint: ") and folder.name in refusal


@pytest.mark.slow
def test_ranks_fail_together(two_ranks: RankPool, tmp_path: Path) -> None:
    """Where only one of them has a disk that fails, nobody waits for it."""
    setting = programs.Setup("transformer", facts_of("transformer"), "fsdp")
    two_ranks(programs.train_and_save, setting, str(tmp_path / "sound"))
    for refusals in two_ranks(programs.refuse, setting, [str(tmp_path / "sound")], 1):
        assert refusals == ["CheckpointError: rank 1's file cannot be read: Input/output error."]
