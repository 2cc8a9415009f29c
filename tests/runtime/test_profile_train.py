"""Traces of chosen steps from chosen ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from meshwright.errors import BadInput
from meshwright.runtime.profile_train import ProfileOptions, TrainProfiler

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("steps", "ranks", "wish"),
    [
        ("5", "0", ProfileOptions(first=5, last=5)),
        ("5-7", "0, 3", ProfileOptions(first=5, last=7, ranks=(0, 3))),
        ("1-2", "all", ProfileOptions(first=1, last=2, ranks=None)),
    ],
)
def test_wishes_as_they_are_written(steps: str, ranks: str, wish: ProfileOptions) -> None:
    assert ProfileOptions.parse(steps, ranks) == wish
    assert pickle.loads(pickle.dumps(wish)) == wish


@pytest.mark.parametrize("steps", ["0", "7-5", "first", "1-", "1-101", ""])
def test_steps_that_are_none(steps: str) -> None:
    with pytest.raises(BadInput, match="names no steps: write 5 or 5-7"):
        ProfileOptions.parse(steps)


def test_ranks_that_are_none() -> None:
    with pytest.raises(BadInput, match="names no ranks"):
        ProfileOptions.parse("5", "first")


def run(profiler: TrainProfiler, steps: int) -> None:
    for step in range(1, steps + 1):
        with profiler.around(step):
            torch.mm(torch.ones(step, 4), torch.ones(4, 4))
    profiler.close()


def test_only_the_wished_steps_are_traced(tmp_path: Path) -> None:
    run(TrainProfiler(ProfileOptions.parse("2-3"), tmp_path, rank=0, device=CPU), steps=5)
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "rank-0_steps-2-3.json"
    events = json.loads(file.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 2


def test_a_run_that_ends_early_keeps_what_it_traced(tmp_path: Path) -> None:
    run(TrainProfiler(ProfileOptions.parse("2-9"), tmp_path, rank=3, device=CPU), steps=0)
    assert not (tmp_path / "profile").exists()
    wish = ProfileOptions.parse("2-9", "all")
    run(TrainProfiler(wish, tmp_path, rank=3, device=CPU), steps=4)
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["rank-3_steps-2-4.json"]


def test_other_ranks_keep_nothing(tmp_path: Path) -> None:
    run(TrainProfiler(ProfileOptions.parse("1", "0"), tmp_path, rank=1, device=CPU), steps=2)
    run(TrainProfiler(None, tmp_path, rank=0, device=CPU), steps=2)
    assert list(tmp_path.iterdir()) == []
