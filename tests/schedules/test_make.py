import pytest

from meshwright import schedules
from meshwright.errors import Refused, UnknownTerm
from meshwright.facts.model_axis import MODEL_AXES
from meshwright.schedules import (
    FAMILIES,
    check_complete,
    least_micro_batches,
    make,
    micro_batches_near,
    refuse,
    simulate,
)


def test_public_names_are_sorted_and_there() -> None:
    # Constants, then classes, then functions: ruff's order.
    assert schedules.__all__ == sorted(schedules.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(schedules, name) for name in schedules.__all__)


def test_every_schedule_of_the_grammar_can_be_made() -> None:
    assert set(MODEL_AXES["pp"].suffixes) | {MODEL_AXES["layers"].schedule} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_allowed_size_is_complete_and_ends(name: str, ranks: int) -> None:
    for wanted in range(1, 3 * ranks):
        schedule = make(name, ranks, micro_batches_near(name, ranks, wanted))
        check_complete(schedule)
        simulate(schedule)


def test_layers_keeps_one_micro_batch_in_flight() -> None:
    schedule = make("layers", 3, 2)
    running = [[cell for cell in column if cell] for column in zip(*schedule.rows, strict=True)]
    assert all(len(cells) == 1 for cells in running)
    assert [str(cells[0][0]) for cells in running[:6]] == ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]


def test_an_unknown_name_gets_a_guess() -> None:
    with pytest.raises(UnknownTerm, match="Unknown schedule '1f1'; did you mean '1f1b'"):
        make("1f1", 2, 2)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "message"),
    [
        ("gpipe", 4, 0, "gpipe on 4 ranks cannot run 0 micro-batches: it needs at least 1; 1 would do."),
        ("1f1b", 4, 3, "1f1b on 4 ranks cannot run 3 micro-batches: it needs at least as many as ranks; 4 would do."),
        (
            "interleaved",
            4,
            9,
            "interleaved on 4 ranks cannot run 9 micro-batches: it needs a multiple of its rounds, which are the "
            "micro-batches // ranks; 8 or 10 would do.",
        ),
        (
            "dualpipev",
            2,
            3,
            "dualpipev on 2 ranks cannot run 3 micro-batches: it needs at least as many as stages, which are two on "
            "each rank; 4 would do.",
        ),
    ],
)
def test_refusals_name_the_nearest_numbers(name: str, ranks: int, micro_batches: int, message: str) -> None:
    assert refuse(name, ranks, micro_batches) == message
    with pytest.raises(Refused) as caught:
        make(name, ranks, micro_batches)
    assert str(caught.value) == message


def test_refuse_passes_what_can_run() -> None:
    assert [refuse(name, 4, 8) for name in FAMILIES] == [None] * len(FAMILIES)


def test_ranks_have_to_be_there() -> None:
    with pytest.raises(Refused, match="0 pipeline ranks"):
        refuse("gpipe", 0, 4)


@pytest.mark.parametrize(
    ("name", "wanted", "near"),
    [("1f1b", 2, 4), ("1f1b", 7, 7), ("zb", 9, 10), ("zb", 13, 12), ("zbv", -3, 1), ("dualpipev", 1, 8)],
)
def test_micro_batches_near(name: str, wanted: int, near: int) -> None:
    assert micro_batches_near(name, 4, wanted) == near


def test_least_micro_batches() -> None:
    least = {name: least_micro_batches(name, 4) for name in FAMILIES}
    assert least == {"layers": 1, "gpipe": 1, "1f1b": 4, "interleaved": 1, "zb": 1, "zbv": 1, "dualpipev": 8}


def test_stages_on_each_rank() -> None:
    made = {name: make(name, 2, 4).virtual for name in FAMILIES}
    assert made == {"layers": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 1, "zbv": 2, "dualpipev": 2}
    assert make("interleaved", 2, 4, virtual=3).stages == 6
    with pytest.raises(Refused, match="gpipe was asked for virtual=2, but has always 1"):
        make("gpipe", 2, 4, virtual=2)
