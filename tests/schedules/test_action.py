import pytest

from meshwright.schedules import Action, Kind, ScheduleError


@pytest.mark.parametrize("kind", Kind)
def test_text_round_trip(kind: Kind) -> None:
    action = Action(12, kind, 3)
    assert str(action) == f"12{kind.value}3"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 ", "-1F0", "2f0", "2F0;1B0"])
def test_bad_text(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"like 2F0\.$"):
        Action.parse(text)


def test_a_whole_backward_pass_is_two_parts() -> None:
    assert [str(part) for part in Action.parse("1B2").parts] == ["1I2", "1W2"]
    assert [str(part) for part in Action.parse("1F2").parts] == ["1F2"]
