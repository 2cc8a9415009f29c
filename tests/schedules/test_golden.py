"""A grid that changes is seen: rewrite the files with `python tests/schedules/golden_files.py` where it should."""

import pytest

from meshwright.schedules import Schedule, make
from schedules.golden_files import CASES, FOLDER, path_of


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), CASES)
def test_the_grid_is_the_file(name: str, ranks: int, micro_batches: int) -> None:
    text = path_of(name, ranks, micro_batches).read_text()
    schedule = make(name, ranks, micro_batches)
    assert f"{schedule}\n" == text
    assert Schedule.parse(text) == schedule


def test_no_file_is_left_over() -> None:
    assert {path_of(*case) for case in CASES} == set(FOLDER.glob("*.txt"))
