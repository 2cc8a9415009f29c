"""Gradients of a parameter that several stages hold are summed over them, and that takes time."""

import pytest

from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.collectives import RankGroup
from meshwright.planner.search import consider

VOCABULARY, WIDTH = 8192, 128
ONE_A_NODE, TWO_A_NODE = RankGroup(2, 1, 2, 1), RankGroup(2, 1, 2, 2)


def planner_of(*, tied: bool) -> Planner:
    shape = Shape(
        layers=8, width=WIDTH, heads=4, kv_heads=4, feed_forward=256, vocabulary=VOCABULARY, length=32, tied=tied
    )
    job = decoder_job(shape, global_batch=16)
    made = Planner(job, describe(job), job.global_batch)
    made.measure("fp32", "none")
    return made


@pytest.fixture(scope="module")
def tied() -> Planner:
    return planner_of(tied=True)


@pytest.fixture(scope="module")
def untied() -> Planner:
    return planner_of(tied=False)


@pytest.mark.parametrize(
    ("strategy", "cluster", "sharded", "group"),
    [
        ("pp=2:1f1b,mb=2", "2x1xA100-40GB", 1, ONE_A_NODE),
        ("ddp=2,pp=2:1f1b,mb=2", "2x2xA100-40GB", 1, TWO_A_NODE),
        ("zero1=2,pp=2:1f1b,mb=2", "2x2xA100-40GB", 2, TWO_A_NODE),
        ("fsdp=2,pp=2:1f1b,mb=2", "2x2xA100-40GB", 2, TWO_A_NODE),
        ("pp=4:interleaved,mb=2", "2x2xA100-40GB", 1, ONE_A_NODE),
    ],
)
def test_the_first_and_the_last_stage_sum_it(
    tied: Planner, untied: Planner, strategy: str, cluster: str, sharded: int, group: RankGroup
) -> None:
    """Of sharded gradients each rank sums its own, and ranks of one stage share their node's link."""
    times = [
        consider(planner.context(Cluster.parse(cluster)), Strategy.parse(strategy)).forecast.time["stages"]
        for planner in (tied, untied)
    ]
    costs = tied.context(Cluster.parse(cluster)).stage_costs
    sum_of_all = costs.collective("all_reduce", 4.0 * VOCABULARY * WIDTH / sharded, group)
    assert times[0] - times[1] == pytest.approx(sum_of_all)


def test_where_one_rank_has_both_nothing_is_sent(tied: Planner, untied: Planner) -> None:
    times = [
        consider(planner.context(Cluster.parse("2x1xA100-40GB")), Strategy.parse("pp=2:zbv,mb=2")).forecast.time
        for planner in (tied, untied)
    ]
    assert times[0]["stages"] == pytest.approx(times[1]["stages"])
