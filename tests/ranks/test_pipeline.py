"""Pipelines and layer-wise placement, alone and with every data strategy, train as one process does."""

import pytest

import pipeline_programs as programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]


def check(pool: RankPool, job: str, strategies: list[str]) -> None:
    for verdict in pool(programs.verdicts, job, strategies)[0]:
        assert verdict.equal, f"{verdict.strategy}: {verdict.first_difference}"
        if "fp16" not in verdict.strategy and "bf16" not in verdict.strategy:
            assert verdict.loss_max_rel <= 1e-5, verdict


def test_every_schedule(two_ranks: RankPool) -> None:
    check(two_ranks, "tied", [*(f"pp=2:{schedule}" for schedule in SCHEDULES), "layers=2"])
