"""From what ranks tell to rows: order of starts, figures, equality, and what becomes of failures."""

from __future__ import annotations

import pytest

import tiny_jobs
from compare_outcomes import Starts, made_up
from meshwright.commands import verify
from meshwright.compare import start as compare_start
from meshwright.compare.compare import Matrix, compare, note_on_cores
from meshwright.compare.start import LaunchOutcome, start
from meshwright.describe.model import describe
from meshwright.errors import BadInput, RankFailed, UnknownTerm
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import Timeline
from meshwright.runtime.place import place_for
from meshwright.runtime.request import CompareRequest, CompareTask
from meshwright.verify import strategy_choice
from meshwright.verify.strategy_choice import Choice, plain_strategies

TASK = CompareTask(
    request=CompareRequest(job="job.py", ranks=2),
    facts=ModelFacts(parameters=(), blocks=()),
    device="cpu",
    strategy=Strategy.parse("ddp"),
    profile=False,
)


def test_rounds_go_over_all_strategies_and_back() -> None:
    starts = Starts()
    made_up("ddp", "zero2", "fsdp", starts=starts)
    assert starts.asked == ["single", "ddp=2", "zero2=2", "fsdp=2", "fsdp=2", "zero2=2", "ddp=2"]


def test_what_failed_once_is_not_run_again_and_the_rest_goes_on() -> None:
    starts = Starts(zero2=LaunchOutcome(status="killed", reason="Rank 1 was ended by SIGKILL."))
    lines: list[str] = []
    done = made_up("ddp", "zero2", "fsdp", starts=starts, lines=lines)
    assert starts.asked.count("zero2=2") == 1 and starts.asked.count("fsdp=2") == 2
    assert [(row["strategy"], row["status"]) for row in done.rows] == [
        ("ddp", "ok"),
        ("fsdp", "ok"),
        ("zero2", "killed"),
    ]
    assert done.rows[-1]["reason"] == "Rank 1 was ended by SIGKILL."
    assert "[3/7] round 1, zero2: KILLED: Rank 1 was ended by SIGKILL." in lines[2]


class Interrupted(Starts):
    """As if Ctrl-C came at the nth start."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def __call__(self, task: CompareTask, ranks: int, *, timeout: float) -> LaunchOutcome:
        if len(self.asked) + 1 == self._at:
            raise KeyboardInterrupt
        return super().__call__(task, ranks, timeout=timeout)


def test_an_interrupt_leaves_what_was_measured() -> None:
    lines: list[str] = []
    done = made_up("ddp", "zero2", "fsdp", starts=Interrupted(4), lines=lines)
    assert done.interrupted
    assert [(row["strategy"], row["status"], row["rounds"]) for row in done.rows] == [
        ("ddp", "ok", 1),
        ("zero2", "ok", 1),
        ("fsdp", "not run", 0),
    ]
    assert "interrupted before its turn" in done.rows[-1]["reason"]
    assert lines[-1] == "[4/7] round 1, fsdp: interrupted; the results so far follow"


def test_an_interrupt_before_any_strategy_had_its_turn_gets_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        made_up("ddp", "zero2", starts=Interrupted(2))


def test_the_fastest_leads_and_others_are_held_against_it() -> None:
    rows = made_up("fsdp", "zero2", "ddp").rows
    assert [row["strategy"] for row in rows] == ["ddp", "zero2", "fsdp"]
    assert [row["against_best"] for row in rows] == pytest.approx([1.0, 0.5, 0.25])
    assert [row["step_ms"] for row in rows] == pytest.approx([100.0, 200.0, 400.0])
    assert rows[0]["samples_per_s"] == pytest.approx(160.0)


def test_memory_is_that_of_the_fullest_rank() -> None:
    (row,) = made_up("ddp").rows
    assert row["peak_mib_ranks"] == [8.0, 9.0]
    assert (row["peak_mib"], row["process_mib"]) == (9.0, 300.0)
    assert row["memory"] == {"parameters": 1.0, "gradients": 1.0, "optimizer": 2.0, "rest": 5.0}


def test_time_by_cause_is_the_profile_s_shares_of_the_median_step() -> None:
    (row,) = made_up("zero2").rows
    assert (row["comm_share"], row["comm_exposed"]) == pytest.approx((0.4, 0.3))
    assert row["time"] == pytest.approx({"compute": 100.0, "exposed communication": 60.0, "other": 40.0})


def test_losses_are_held_against_one_process() -> None:
    rows = {row["strategy"]: row for row in made_up("ddp", "zero2").rows}
    assert rows["ddp"]["loss_equal"] is True and rows["ddp"]["loss_max_rel"] == 0.0
    assert rows["zero2"]["loss_equal"] is False and rows["zero2"]["loss_max_rel"] == pytest.approx(1e-3)


def test_without_its_reference_a_strategy_is_neither_equal_nor_different() -> None:
    starts = Starts(single=LaunchOutcome(status="out of memory", reason="too large for one process"))
    done = made_up("ddp", starts=starts)
    assert done.rows[0]["status"] == "ok" and done.rows[0]["loss_equal"] is None
    assert done.references[0]["status"] == "out of memory"


def test_a_pipeline_s_idle_time_and_timeline() -> None:
    (row,) = made_up("pp=2:gpipe,mb=16").rows
    # Two ranks compute a quarter of the step each, one after the other: half of the time between is idle.
    assert row["bubble"] == pytest.approx(0.5)
    timeline = Timeline.from_json(row["timeline"])
    assert timeline.total == pytest.approx(0.1)
    update = [piece for piece in timeline.pieces if piece.kind == "update"]
    assert [(piece.rank, piece.start) for piece in update] == [(0, pytest.approx(0.08)), (1, pytest.approx(0.08))]


def test_a_strategy_that_was_named_and_cannot_be_is_a_row() -> None:
    done = made_up("ddp", "tp=3")
    assert done.rows[-1]["status"] == "refused" and "multiple of 3 ranks" in done.rows[-1]["reason"]
    assert done.left_out == []


def test_where_none_is_named_what_cannot_be_is_left_out() -> None:
    done = made_up(rounds=1)
    names = {row["strategy"] for row in done.rows}
    assert {"ddp", "zero1", "zero2", "fsdp", "tp=2", "op=2", "pp=2:1f1b", "pp=2:zbv", "layers=2"} <= names
    assert all(row["status"] == "ok" for row in done.rows)
    assert not names & {one["strategy"] for one in done.left_out}


def test_at_four_ranks_there_are_more_than_twelve_to_choose_from() -> None:
    four = list(plain_strategies(4))
    assert len(four) == len(set(four)) > 12
    assert {"hsdp=2x2", "tp=4", "fsdp,tp=2", "pp=4:interleaved", "pp=2:1f1b", "tp=2,pp=2:1f1b"} <= set(four)
    assert list(plain_strategies(1)) == ["single"]


def test_dp_is_one_process_with_a_device_for_each_rank() -> None:
    able = Choice(text="dp", strategy=Strategy.parse("dp=2"))
    matrix = Matrix(job=tiny_jobs.transformer, facts=describe(tiny_jobs.transformer), device="cuda", choices=[able])
    cells = [(str(cell.strategy), cell.ranks) for cell in matrix.cells(ranks=2, rounds=1)]
    assert cells == [("single", 1), ("dp=2", 1)]


def test_dp_is_refused_in_a_sentence_where_there_are_no_gpus() -> None:
    job, place = tiny_jobs.transformer, place_for("cpu", 2)
    for choose in (strategy_choice.choose, verify.choose):
        chosen = [choice for choice in choose(job, describe(job), place, ["dp", "ddp"]) if choice.strategy is None]
        assert [choice.text for choice in chosen] == ["dp"] and "use ddp" in chosen[0].reason


def test_a_word_that_is_no_strategy_is_an_error_before_anything_starts() -> None:
    starts = Starts()
    with pytest.raises(UnknownTerm):
        made_up("ddp", "fsdpp", starts=starts)
    assert starts.asked == []


def test_under_a_launcher_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(BadInput, match="without torchrun"):
        compare(CompareRequest(job="job.py", ranks=2))


def test_a_device_that_is_none() -> None:
    with pytest.raises(BadInput, match="must be cpu or cuda, not 'tpu'"):
        compare(CompareRequest(job="job.py", ranks=2, device="tpu"))


@pytest.mark.parametrize(
    ("message", "signal", "status"),
    [
        ("Rank 1 was ended by SIGKILL; the machine may have run out of memory.", "SIGKILL", "killed"),
        ("Rank 0 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", None, "out of memory"),
        ("Rank 0 failed: RuntimeError: DefaultCPUAllocator: not enough memory: you tried ...", None, "out of memory"),
        ("Rank 1 failed: ValueError: bad sample", None, "failed"),
        ("Rank 1 failed: ValueError: my loader was ended by SIGTERM", None, "failed"),
    ],
)
def test_what_a_failure_is_called(
    message: str, signal: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RankFailed(f"{message}\nand more", rank=0, signal=signal)

    monkeypatch.setattr(compare_start, "launch", fail)
    assert start(TASK, 2, timeout=5.0) == LaunchOutcome(status=status, reason=message)


def test_an_interrupt_of_the_user_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_start, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(TASK, 2, timeout=5.0)


def test_ranks_that_share_cores_are_told() -> None:
    assert "take turns" in note_on_cores(10_000, "cpu")
    assert note_on_cores(1, "cpu") == note_on_cores(10_000, "cuda") == ""
