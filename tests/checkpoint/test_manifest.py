"""`checkpoint.json`: what is not one, or not ours, or forged, is an error that says so, and never another."""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from torch.optim import AdamW
from torch.optim.lr_scheduler import MultiStepLR

import meshwright as mw
from meshwright.checkpoint.integrity import inspect
from meshwright.checkpoint.manifest import DIGESTS, MANIFEST, VERSION, digest_line, read_manifest
from meshwright.errors import CheckpointError, DamagedCheckpoint, WrongCheckpoint
from minimal import make_job, sample

Document = dict[str, Any]
MUTATIONS = 300


@pytest.fixture(scope="module")
def run() -> Iterator[mw.Run]:
    job = make_job(
        optimizer=lambda params: AdamW(params, lr=1e-3), schedule=lambda optimizer: MultiStepLR(optimizer, [2, 5])
    )
    with mw.setup(job, "single", device="cpu") as made:
        made.step(sample(8))
        yield made


@pytest.fixture(scope="module")
def saved(run: mw.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "saved"
    run.save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil; its data files are those of the original."""
    made = tmp_path / "spoilt"
    made.mkdir()
    for path in saved.iterdir():
        (made / path.name).hardlink_to(path)
    for name in (MANIFEST, DIGESTS):
        (made / name).unlink()
    return made


def write(folder: Path, text: str) -> Path:
    """With the digest that belongs to it: whoever forges one can forge both."""
    for name, content in ((MANIFEST, text), (DIGESTS, digest_line(text))):
        (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    return folder


def document(saved: Path) -> Document:
    found: Document = json.loads((saved / MANIFEST).read_text())
    return found


def test_a_sound_one(run: mw.Run, saved: Path, folder: Path) -> None:
    write(folder, json.dumps(document(saved)))
    assert inspect(folder, read_manifest(folder)) == []
    run.load(folder)


def test_as_it_was_written(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert manifest.text() == (saved / MANIFEST).read_text()
    assert (manifest.run_state.step, manifest.run_state.samples, manifest.run_state.ranks) == (1, 0, 1)
    assert manifest.run_state.strategy == "single"
    assert set(manifest.run_state.made) == {"meshwright", "torch", "python", "at"}


@pytest.mark.parametrize("version", [VERSION + 1, 99, 10**30])
def test_a_newer_version_says_which_to_use(saved: Path, folder: Path, version: int) -> None:
    write(folder, json.dumps(document(saved) | {"version": version, "a new field": 1}))
    with pytest.raises(WrongCheckpoint, match=f"format version {version}; .* use a newer"):
        read_manifest(folder)


def test_a_truth_is_no_version(saved: Path, folder: Path) -> None:
    write(folder, json.dumps(document(saved) | {"version": True}))
    with pytest.raises(DamagedCheckpoint, match="version is True"):
        read_manifest(folder)


@pytest.mark.parametrize("rate", ["fast", [0.1], {"dict": []}])
def test_a_learning_rate_that_is_none(saved: Path, folder: Path, rate: object) -> None:
    changed = document(saved)
    changed["optimizer"]["groups"][0]["values"] = {"dict": [["lr", rate]]}
    write(folder, json.dumps(changed))
    with pytest.raises(DamagedCheckpoint, match="learning rate"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "null", "1", "true", '"text"', "[]", "{}", "[1, 2]", "{", '{"format": "meshwright checkpoint"}'),
        *('{"version": 1}', '{"format": "x", "version": 1}', '{"format": ["meshwright checkpoint"], "version": 1}'),
        *('{"format": "meshwright checkpoint", "version": 1}', '{"name": "someone else\'s", "dependencies": {}}'),
        *('{"weight_map": {"a": "b.safetensors"}, "metadata": {}}', "\ufeff{}", "NaN", "Infinity", "\x00" * 100),
        *("[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '{"format": "meshwright checkpoint", "version": "1"}'),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_foreign_text(folder: Path, text: str) -> None:
    write(folder, text)
    with pytest.raises(DamagedCheckpoint, match=MANIFEST):
        read_manifest(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x80\x04\x95pickle", b"\x00\xd8"])
def test_bytes_that_are_no_text(folder: Path, content: bytes) -> None:
    (folder / DIGESTS).touch()
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=f"{MANIFEST} is damaged: it is not UTF-8 text"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ".", "", "a/../b", "./a", "a\0b", "a\nb"])
def test_names_that_lead_elsewhere(run: mw.Run, saved: Path, folder: Path, name: str) -> None:
    """What lies beside the checkpoint is not read."""
    (folder.parent / "outside").write_bytes((saved / "rank-00000.safetensors").read_bytes())
    text = json.dumps(document(saved)).replace('"rank-00000.safetensors"', json.dumps(name))
    with pytest.raises(CheckpointError):
        run.load(write(folder, text))


def put(*path: str | int, value: Any) -> Callable[[Document], None]:
    def change(found: Document) -> None:
        *above, last = path
        inner: Any = found
        for key in above:
            inner = inner[key]
        inner[last] = value

    return change


WEIGHT = ("tensors", "model/0.weight")
CHUNK = (*WEIGHT, "chunks", 0)
FILE = ("files", "rank-00000.safetensors")
WRONG: dict[str, Callable[[Document], None]] = {
    f"{'.'.join(map(str, path))}={value!r}": put(*path, value=value)
    for path, values in {
        ("step",): ("1", None, 1.5, -1, [1], True),
        ("samples",): ("0", None, -8, {}),
        ("seed",): ("0", None, []),
        ("strategy",): (1, None, {}),
        ("ranks",): ("1", None, 0, -1),
        ("tied",): (None, [], {"a": 1}, "a"),
        ("made",): (None, []),
        ("optimizer",): ([], "AdamW", {}, {"class": "AdamW"}, {"groups": []}),
        ("optimizer", "groups"): (None, {}, [1], [{}], [{"names": None, "values": {}}], [{"names": [1], "values": 1}]),
        ("schedule",): ([], "StepLR", {}, {"class": "MultiStepLR"}),
        ("loss_scale",): ([], 3.0),
        ("tensors",): (None, [], {}, {"model/0.weight": None}),
        ("files",): (None, [], {}, {"rank-00000.safetensors": []}),
        (*FILE, "bytes"): ("1", None, -1),
        (*FILE, "sha256"): (1, None),
        (*WEIGHT, "dtype"): (None, 1, "", "nonsense", "torch.float32", "nn", "float64"),
        (*WEIGHT, "shape"): (None, 4, "ab", ["6", "4"], [6, -4], [6], [6.0, 4.0], [2**70, 1], [6, [4]]),
        (*WEIGHT, "chunks"): (None, {}, [], [None], [{}]),
        (*CHUNK, "offsets"): (None, 0, [0], ["0", 0], [-1, 0], [1, 0], [0, 0, 0], [0.0, 0]),
        (*CHUNK, "sizes"): (None, 0, [6], [6, "4"], [-6, -4], [3, 4], [6, 5], [12, 2], [2**70, 1]),
        (*CHUNK, "at"): (None, "8", -1, 2**70, 0.5),
        (*CHUNK, "file"): (None, 1, "checkpoint.json", "rank-00001.safetensors"),
        (*CHUNK, "sha256"): (None, 1),
    }.items()
    for value in values
}


@pytest.mark.parametrize("name", WRONG)
def test_a_field_that_is_not_what_it_should_be(run: mw.Run, saved: Path, folder: Path, name: str) -> None:
    """Though the digests agree: a bug or a forger wrote it."""
    found = document(saved)
    WRONG[name](found)
    with pytest.raises(CheckpointError):
        run.load(write(folder, json.dumps(found)))


def test_a_field_that_is_missing_or_unknown(saved: Path, folder: Path) -> None:
    for key in ("step", "samples", "seed", "strategy", "ranks", "tensors", "files"):
        found = document(saved)
        del found[key]
        with pytest.raises(DamagedCheckpoint, match=key):
            read_manifest(write(folder, json.dumps(found)))
    with pytest.raises(DamagedCheckpoint, match="surprise"):
        read_manifest(write(folder, json.dumps(document(saved) | {"surprise": 1})))


VALUES = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**80), 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "model/0.weight", "../x", "a\0b", "\ud800", "float32", "int64", "rank-00000.safetensors"),
    *([], [0], [1, 2], ["a"], [[]], {}, {"a": 1}, {"tuple": [1]}, {"dict": 3}, {"tensor": "x", "dtype": "y"}),
]


def mutate(found: Document, draw: random.Random) -> str:
    """Change one thing somewhere; says what."""
    places = list(_places(found))
    inner, key = draw.choice(places)
    kind = draw.choice(["replace", "replace", "replace", "delete", "add", "swap"])
    if kind == "replace":
        inner[key] = deepcopy(draw.choice(VALUES))
    elif kind == "delete":
        del inner[key]
    elif kind == "add" and isinstance(inner, list):
        inner.insert(draw.randint(0, len(inner)), deepcopy(draw.choice([*inner, *VALUES])))
    elif kind == "add":
        inner[draw.choice(["", "model/more", "optimizer/more/step", "step:int", "x"])] = deepcopy(draw.choice(VALUES))
    else:
        other, name = draw.choice(places)
        inner[key], other[name] = deepcopy(other[name]), deepcopy(inner[key])
    return f"{kind} {key!r}"


def _places(found: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(found) if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else []
    for key in keys:
        yield found, key
        yield from _places(found[key])


def test_mutations_raise_nothing_else(run: mw.Run, saved: Path, folder: Path) -> None:
    """Of hundreds of changes with digests that agree, each is refused as a bad checkpoint, or harmless."""
    draw = random.Random(0)
    original = document(saved)
    strange, refused = [], 0
    for number in range(MUTATIONS):
        found = deepcopy(original)
        changes = [mutate(found, draw) for _ in range(draw.choice([1, 1, 1, 2]))]
        write(folder, json.dumps(found))
        try:
            inspect(folder, read_manifest(folder))
            run.load(folder)
        except CheckpointError:
            refused += 1
        except Exception as error:
            strange.append(f"{number}: {', '.join(changes)}: {type(error).__name__}: {error}")
    assert strange == []
    assert refused > MUTATIONS / 2
    run.load(saved)
    run.step(sample(8))
