import pytest

from meshwright.schedules import FAMILIES, Schedule, ScheduleError, TimedAction, make, simulate

SIZES = [(2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 8), (8, 24)]
"""Ranks and micro-batches, a multiple of them: the closed forms hold for whole rounds."""

HEADER = "mine ranks=2 virtual=1 micro_batches=1 placement=loop"


def tiny(first: str, second: str, header: str = HEADER) -> Schedule:
    return Schedule.parse(f"{header}\nrank 0  {first}\nrank 1  {second}")


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, ranks: int, micro_batches: int) -> None:
    result = simulate(make(name, ranks, micro_batches))
    assert result.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert result.total == 3 * (micro_batches + ranks - 1)


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_bubble_of_interleaved(ranks: int, micro_batches: int, virtual: int) -> None:
    result = simulate(make("interleaved", ranks, micro_batches, virtual=virtual))
    assert result.bubble == pytest.approx((ranks - 1) / (virtual * micro_batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_bubble_of_the_others(ranks: int, micro_batches: int) -> None:
    bubble = {name: simulate(make(name, ranks, micro_batches)).bubble for name in ("layers", "1f1b", "zb", "zbv")}
    assert bubble["layers"] == pytest.approx(1 - 1 / ranks)
    assert bubble["zb"] == pytest.approx((ranks - 1) / (3 * micro_batches + ranks - 1))
    assert bubble["zbv"] <= bubble["zb"] < bubble["1f1b"] < bubble["layers"]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 3), (2, 8), (4, 7), (4, 16), (8, 15)])
def test_zbv_never_idles_between_a_ranks_first_action_and_its_last(ranks: int, micro_batches: int) -> None:
    result = simulate(make("zbv", ranks, micro_batches))
    assert [row[-1].end - row[0].start for row in result.spans] == list(result.busy)
    assert result.bubble == pytest.approx((ranks - 1) / (6 * micro_batches + ranks - 1))


def test_spans_and_sends() -> None:
    result = simulate(tiny("0F0 0B0", "1F0 1B0"), forward=1.0, backward_input=2.0, backward_weight=3.0, send=0.5)
    times = [[(str(span.action), span.start, span.end) for span in row] for row in result.spans]
    assert times == [[("0F0", 0.0, 1.0), ("0B0", 8.0, 13.0)], [("1F0", 1.5, 2.5), ("1B0", 2.5, 7.5)]]
    assert (result.total, result.busy) == (13.0, (6.0, 6.0))
    assert result.bubble == pytest.approx(1 - 12 / 26)
    assert isinstance(result.spans[0][0], TimedAction)


def test_costs_by_stage() -> None:
    result = simulate(make("gpipe", 2, 2), forward=[1, 2], backward_input=[3, 4], backward_weight=0)
    assert result.busy == (8, 12)


def test_a_turn_on_the_same_rank_sends_nothing() -> None:
    schedule = make("zbv", 1, 1)
    assert simulate(schedule, send=100.0).total == simulate(schedule).total


def test_a_pair_waits_for_both_and_hands_on_both() -> None:
    header = "mine ranks=2 virtual=1 micro_batches=2 placement=loop"
    paired = simulate(tiny("0F0 0F1 0B0 0B1", "1F0 1F1;1B0 1B1 .", header))
    apart = simulate(tiny("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", header))
    assert paired.total == apart.total
    assert [span.start for span in paired.spans[1]] == [1, 2, 3, 5]


def test_idle_steps_cost_nothing() -> None:
    assert simulate(tiny(". 0F0 . 0B0", "1F0 . . 1B0")).spans == simulate(tiny("0F0 0B0", "1F0 1B0")).spans


def test_costs_of_nothing_have_no_bubble() -> None:
    assert simulate(make("1f1b", 2, 2), forward=0, backward_input=0, backward_weight=0).bubble == 0


@pytest.mark.parametrize(
    ("name", "by_rank_until_input", "by_rank_until_weight"),
    [
        ("layers", (1, 1, 1, 1), (1, 1, 1, 1)),
        ("gpipe", (8, 8, 8, 8), (8, 8, 8, 8)),
        ("1f1b", (4, 3, 2, 1), (4, 3, 2, 1)),
        ("interleaved", (11, 9, 7, 5), (11, 9, 7, 5)),
        ("zb", (4, 3, 2, 1), (4, 4, 4, 4)),
        ("zbv", (8, 8, 8, 8), (8, 8, 8, 8)),
    ],
)
def test_in_flight(name: str, by_rank_until_input: tuple[int, ...], by_rank_until_weight: tuple[int, ...]) -> None:
    result = simulate(make(name, 4, 8))
    assert result.until_input.ranks == by_rank_until_input
    assert result.until_weight.ranks == by_rank_until_weight


def test_in_flight_by_stage() -> None:
    assert simulate(make("interleaved", 2, 4)).until_weight.stages == (4, 3, 2, 1)
    assert simulate(tiny("0F0 0I0 0W0", "1F0 1B0 .")).until_input.stages == (1, 1)


def test_a_deadlock_names_what_each_rank_waits_for() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(tiny("0B0 0F0", "1F0 1B0"))
    assert str(caught.value).startswith(
        "The schedule deadlocks: rank 0 is stuck at 0B0, which waits for 0F0; "
        "rank 1 is stuck at 1F0, which waits for 0F0."
    )


def test_a_deadlock_between_ranks() -> None:
    header = "mine ranks=2 virtual=1 micro_batches=2 placement=loop"
    message = "rank 0 is stuck at 0B0, which waits for 1B0; rank 1 is stuck at 1F1, which waits for 0F1"
    with pytest.raises(ScheduleError, match=message):
        simulate(tiny("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", header))


def test_weights_before_inputs_is_a_deadlock() -> None:
    with pytest.raises(ScheduleError, match="rank 0 is stuck at 0W0, which waits for 0I0"):
        simulate(tiny("0F0 0W0 0I0", "1F0 1B0 ."))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("0F0 0B0", "1F0 .", r"misses work .*: 1I0, 1W0\."),
        ("0F0 0I0", "1F0 1B0", r"misses work .*: 0W0\."),
        ("0F0 0B0 0W0", "1F0 1B0 .", r"does work twice .*: 0W0\."),
        ("0F0 0F0 0B0", "1F0 1B0 .", r"does work twice .*: 0F0\."),
        ("0F0 1F0 0B0", "1B0 . .", r"a rank that does not hold their stage: 1F0\."),
        ("0F0 0B0 0F1", "1F0 1B0 .", r"outside its 2 stages and 1 micro-batches: 0F1\."),
        ("0F0 0B0 .", "1F0 1B0 2F0", r"outside its 2 stages and 1 micro-batches: 2F0\."),
    ],
)
def test_work_that_is_missing_repeated_or_misplaced(first: str, second: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(tiny(first, second))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": [1.0, 2.0, 3.0]}, "forward has 3 costs for 2 stages"),
        ({"backward_weight": -1.0}, "backward_weight is -1.0"),
        ({"send": float("nan")}, "send is nan"),
    ],
)
def test_bad_costs(costs: dict[str, float], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(make("gpipe", 2, 2), **costs)


def test_more_costly_sends_never_help() -> None:
    for name in FAMILIES:
        totals = [simulate(make(name, 4, 8), send=send).total for send in (0.0, 0.5, 2.0)]
        assert totals == sorted(totals)
