import dataclasses
import re

import pytest

from meshwright.schedules import FAMILIES, Schedule, ScheduleError, make

TEXT = """\
1f1b ranks=2 virtual=1 micro_batches=2 placement=loop
rank 0  0F0 0F1 .   0B0 .   0B1
rank 1  .   1F0 1B0 1F1 1B1 ."""


def test_the_grid() -> None:
    assert str(make("1f1b", 2, 2)) == TEXT


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 4), (3, 12), (12, 24)])
def test_text_round_trip(name: str, ranks: int, micro_batches: int) -> None:
    schedule = make(name, ranks, micro_batches)
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_stand_under_each_other(name: str) -> None:
    rows = str(make(name, 12, 24)).splitlines()[1:]
    assert len({tuple(word.start() for word in re.finditer(r"\S+", row)) for row in rows}) == 1


def test_parse_takes_indented_text_and_any_name() -> None:
    text = TEXT.replace("1f1b", "mine")
    indented = "\n" + "\n".join(f"    {line}" for line in text.splitlines()) + "\n"
    assert Schedule.parse(indented) == Schedule.parse(text)
    assert Schedule.parse(text).name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (TEXT, "", "must start with a line like '1f1b ranks=4"),
        (" virtual=1", "", "must start with a line like '1f1b ranks=4"),
        ("ranks=2", "ranks=3", "has 3 ranks but 2 rows"),
        ("ranks=2", "ranks=0", "ranks is 0"),
        ("loop", "ring", "must be loop or v, not 'ring'"),
        ("rank 1", "rank 7", "next row must start with 'rank 1'"),
        ("0B1", "", "rows of 5, 6 steps"),
        ("0B0", "0Q0", "Cannot read the action '0Q0'"),
    ],
)
def test_bad_text(old: str, new: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(TEXT.replace(old, new))


def test_loop_placement() -> None:
    schedule = make("interleaved", 4, 4)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_v_placement() -> None:
    schedule = make("zbv", 4, 4)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [schedule.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_actions_of_a_rank_leave_out_idle_steps_and_open_pairs() -> None:
    text = "x ranks=1 virtual=2 micro_batches=1 placement=v\nrank 0  0F0 . 1F0;1B0 0B0"
    assert [str(action) for action in Schedule.parse(text).actions_of(0)] == ["0F0", "1F0", "1B0", "0B0"]


def test_a_schedule_is_a_value() -> None:
    schedule = make("gpipe", 2, 2)
    assert hash(schedule) == hash(make("gpipe", 2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.name = "other"  # type: ignore[misc]
