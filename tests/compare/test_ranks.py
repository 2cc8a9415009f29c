"""Strategies head to head in real ranks: what goes wrong with one is its row, and the rest completes."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from meshwright.compare.compare import Compared, compare
from meshwright.compare.start import LaunchOutcome, start
from meshwright.facts.timeline import Timeline
from meshwright.runtime.request import CompareRequest, CompareTask

CAUSES = ("parameters", "gradients", "optimizer", "rest")
PASSES = ("forward", "backward")
JOBS = Path(__file__).parents[1] / "compare_jobs.py"


@pytest.fixture(scope="module")
def after_grief() -> Compared:
    strategies = ("ddp,mb=1", "ddp,mb=2", "ddp,mb=3", "tp=5", "pp=2:1f1b,mb=4")
    request = CompareRequest(job=f"{JOBS}:fragile", ranks=2, strategies=strategies, steps=2, rounds=1)
    return compare(request, tell=lambda line: None, start=impatient_start)


def impatient_start(task: CompareTask, ranks: int, *, timeout: float) -> LaunchOutcome:
    """The strategy that never comes back is not waited for as long as the others may take on a busy machine."""
    return start(task, ranks, timeout=8 if task.strategy.micro_batch == 3 else timeout)


@pytest.mark.slow
def test_each_grief_is_a_row_with_its_reason(after_grief: Compared) -> None:
    rows = {row["strategy"]: row for row in after_grief.rows}
    assert [rows[f"ddp,mb={size}"]["status"] for size in (1, 2, 3)] == ["killed", "out of memory", "timeout"]
    assert "Rank 1 was ended by SIGKILL" in rows["ddp,mb=1"]["reason"]
    assert "Rank 1 failed" in rows["ddp,mb=2"]["reason"] and "allocate" in rows["ddp,mb=2"]["reason"]
    assert "8 s" in rows["ddp,mb=3"]["reason"]
    assert rows["tp=5"]["status"] == "refused" and "multiple of 5 ranks" in rows["tp=5"]["reason"]
    assert all(row["step_ms"] is None and row["memory"] == {} for row in after_grief.rows[1:])


@pytest.mark.slow
def test_the_rest_completes_with_all_of_its_figures(after_grief: Compared) -> None:
    row = after_grief.rows[0]
    assert (row["strategy"], row["status"], row["rounds"]) == ("pp=2:1f1b,mb=4", "ok", 1)
    assert row["step_ms_low"] <= row["step_ms"] <= row["step_ms_high"] and len(row["round_ms"]) == 1
    assert row["against_best"] == 1.0
    assert row["samples_per_s"] == pytest.approx(16 / row["step_ms"] * 1e3)
    assert len(row["peak_mib_ranks"]) == 2 and max(row["peak_mib_ranks"]) == row["peak_mib"] > 0
    parameters, gradients, optimizer, rest = (row["memory"][cause] for cause in CAUSES)
    assert parameters == gradients and optimizer == pytest.approx(2 * parameters, rel=0.02)
    assert parameters + gradients + optimizer + rest == pytest.approx(row["peak_mib"])
    assert 0 < row["comm_exposed"] <= row["comm_share"] <= 1
    assert sum(row["time"].values()) == pytest.approx(row["step_ms"])
    assert 0 < row["bubble"] < 1
    assert len(row["losses"]) == 2 + 1 + 2  # checked, warm-up, timed


@pytest.mark.slow
def test_losses_are_those_of_one_process_though_the_job_has_dropout(after_grief: Compared) -> None:
    row, (one,) = after_grief.rows[0], after_grief.references
    assert after_grief.matrix.facts.drops
    assert row["loss_equal"] is True and row["loss_max_rel"] < 1e-6
    assert row["losses"][:2] == pytest.approx(one["losses"][:2], rel=1e-6)


@pytest.mark.slow
def test_the_measured_timeline_has_every_pass_once(after_grief: Compared) -> None:
    timeline = Timeline.from_json(after_grief.rows[0]["timeline"])
    assert (timeline.origin, timeline.ranks, timeline.micro_batches) == ("measured", 2, 4)
    passes = [(piece.kind, piece.stage, piece.micro_batch) for piece in timeline.pieces if piece.kind in PASSES]
    assert sorted(passes) == sorted((kind, stage, number) for kind in PASSES for stage in (0, 1) for number in range(4))
    ends = [max(piece.end for piece in timeline.of(rank)) for rank in (0, 1)]
    assert ends[0] == ends[1] == timeline.total


@pytest.mark.slow
def test_no_rank_is_left_behind(after_grief: Compared) -> None:
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if "meshwright.compare.rank" in child.cmdline()]
