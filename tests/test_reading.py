"""Whatever is in a file of somebody else's: a value, or one sentence."""

import os
import random
from pathlib import Path

import pytest

from meshwright.errors import BadInput, Unreadable
from meshwright.reading import Limits, parse_json, parse_toml, parse_yaml, read_bytes, read_json
from meshwright.strategies.deepspeed.user_config import strategy_of
from mutated_files import BOMBS, Kind, kinds, spoiled

COUNT = 12
"""Spoiled files of each kind; benchmarks/fuzz_readers.py takes thousands."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return kinds(tmp_path_factory.mktemp("sound"))


def outcome(kind: Kind, folder: Path, content: bytes) -> str:
    """What the error said; empty where the file was taken."""
    folder.mkdir(exist_ok=True)
    try:
        kind.read(folder, content)
    except BadInput as error:
        return str(error)
    return ""


def test_sound_files_are_read(sound: dict[str, Kind], tmp_path: Path) -> None:
    said = {}
    for name, kind in sound.items():
        said[name] = outcome(kind, tmp_path / name, kind.content)
    assert {name for name, text in said.items() if text} == {"index"}, said  # whose weights are not beside it


def test_bombs_are_refused_by_every_reader(sound: dict[str, Kind], tmp_path: Path) -> None:
    for name, kind in sound.items():
        for bomb in BOMBS:
            said = outcome(kind, tmp_path / name, bomb)
            # Beside weights a config.json that names no model counts for nothing.
            assert said or name == "config of transformers", (name, bomb[:40])
            assert "\n" not in said and len(said) < 1000, (name, bomb[:40], said)


def test_spoiled_files_are_taken_or_refused_in_a_sentence(sound: dict[str, Kind], tmp_path: Path) -> None:
    rng = random.Random(17)
    for name, kind in sound.items():
        for number in range(COUNT):
            said = outcome(kind, tmp_path / name, spoiled(kind.content, rng))
            assert len(said) < 1500, (name, number, said)


def test_pipes_and_devices_do_not_hang(sound: dict[str, Kind], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(Unreadable, match="not a regular file"):
            read_bytes(path)


def test_a_file_without_end(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unreadable, match="larger than 8 MiB"):
        read_json(tmp_path / "sparse")


def test_limits_on_json() -> None:
    assert parse_json('{"a": [1, 2.5, "x"]}') == {"a": [1, 2.5, "x"]}
    assert parse_json('"[[[[,,,,"', Limits(values=3)) == "[[[[,,,,"
    for text, why in {
        "[" * 70 + "]" * 70: "deeper than 64",
        "[1, 2, 3, 4, 5]": "more than 4 values",
        "9" * 200: "more than 100 digits",
        "NaN": "must be finite",
        "[1": "line 1, column",
    }.items():
        with pytest.raises(ValueError, match=why):
            parse_json(text, Limits(values=100 if "[[" in text else 4))


def test_limits_on_yaml() -> None:
    assert parse_yaml("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}
    with pytest.raises(ValueError, match="aliases expanded"):
        parse_yaml("a: &x [1, 2]\nb: [*x, *x, *x]", Limits(values=8))


def test_limits_on_toml() -> None:
    assert parse_toml("a.b = 1") == {"a": {"b": 1}}
    with pytest.raises(ValueError, match="deeper"):
        parse_toml(".".join("a" * 100) + " = 1")


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": {}},
        {"stage": True},
        {"stage": 3, "offload_optimizer": {"device": ["cpu"]}},
        {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    ],
)
def test_odd_sections_of_deepspeed_s(zero: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="The DeepSpeed configuration"):
        strategy_of({"zero_optimization": zero})
