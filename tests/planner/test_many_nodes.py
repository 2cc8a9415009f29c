"""What gets worse with the number of nodes: crowded networks, and paths on which messages stall."""

from functools import partial

import pytest

from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.links import KINDS
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.collectives import group_on, seconds
from meshwright.planner.host_costs import OURS
from meshwright.planner.search import consider
from meshwright.planner.site import Site
from meshwright.planner.stage_pass import sending
from meshwright.planner.step_layout import StepLayout
from meshwright.planner.time import STALLED_BUCKETS
from meshwright.strategies.model_axis import Sent

SHAPE = Shape(layers=8, width=256, heads=32, kv_heads=32, feed_forward=1024, vocabulary=1024, length=128)
EFA = KINDS["efa"]


@pytest.fixture(scope="module")
def planner() -> Planner:
    job = decoder_job(SHAPE, global_batch=2048)
    made = Planner(job, describe(job), job.global_batch)
    made.measure("bf16", "none")
    return made


def step(planner: Planner, strategy: str, cluster: str) -> dict[str, float]:
    return dict(consider(planner.context(Cluster.parse(cluster)), Strategy.parse(strategy)).forecast.time)


def test_most_runs_over_few_nodes_meet_no_stalled_path() -> None:
    assert EFA.usual_stall(32) == 0.0
    assert EFA.usual_stall(64) == EFA.stall > 0
    assert KINDS["infiniband"].usual_stall(1024) == 0.0, "nothing of the kind was seen there"


def test_each_message_between_stages_stalls_on_a_rank_with_two_neighbours(planner: Planner) -> None:
    plain = step(planner, "pp=4:1f1b,ddp=128,bf16,mb=1", "64x8xH100-80GB@3200Gbps:infiniband")
    stalled = step(planner, "pp=4:1f1b,ddp=128,bf16,mb=1", "64x8xH100-80GB@3200Gbps:efa")
    micro_batches = 2048 // 128
    assert stalled["stages"] - plain["stages"] == pytest.approx(4 * micro_batches * EFA.stall, rel=0.01)
    two = step(planner, "pp=2:1f1b,ddp=256,bf16,mb=1", "64x8xH100-80GB@3200Gbps:efa")
    assert two["stages"] == pytest.approx(2 * (2048 // 256) * EFA.stall, rel=0.01)


def test_gradients_stall_once_a_step_and_buckets_more_often(planner: Planner) -> None:
    summed, buckets = (
        step(planner, f"{data},bf16,mb=1", "64x8xH100-80GB@3200Gbps:efa")["data"] for data in ("zero1", "ddp")
    )
    assert EFA.stall < summed < 1.8 * EFA.stall
    assert STALLED_BUCKETS * EFA.stall < buckets < (STALLED_BUCKETS + 0.5) * EFA.stall
    assert step(planner, "ddp,bf16,mb=1", "32x8xH100-80GB@3200Gbps:efa")["data"] < EFA.stall / 2


def test_a_network_that_others_use_is_slower() -> None:
    """A tensor axis over two nodes, alone and as one of 32 such groups."""
    hardware = hardware_of(Cluster.parse("64x8xH100-80GB@3200Gbps:efa"))
    alone, crowded = (seconds("all_gather", 1e6, group_on(16, 1, 8, nodes), hardware) for nodes in (2, 64))
    assert 1.4 < crowded / alone < 1 + 5 * EFA.crowding
    whole = group_on(512, 1, 8, 64)
    assert seconds("all_gather", 1e6, whole, hardware) == seconds("all_gather", 1e6, group_on(512, 1, 8), hardware)


def test_rings_of_many_nodes_and_of_many_groups_get_less_bandwidth() -> None:
    """The seconds of one more byte, beside the latency of hops."""
    hardware = hardware_of(Cluster.parse("64x8xH100-80GB@3200Gbps:efa"))

    def per_byte(nodes: int, job_nodes: int) -> float:
        group = group_on(8 * nodes, 1, 8, job_nodes)
        return (seconds("all_gather", 2e10, group, hardware) - seconds("all_gather", 1e10, group, hardware)) / 1e10

    assert per_byte(16, 16) / per_byte(2, 2) == pytest.approx((1 + 15 * EFA.ring_contention) / 1.1, rel=0.1)
    assert per_byte(2, 16) / per_byte(2, 2) == pytest.approx(1 + 3 * EFA.ring_crowding / 1.1, rel=0.05)


def test_a_pipeline_with_two_stages_on_a_node_still_spans_nodes(planner: Planner) -> None:
    """Hosts are late for collectives if any pair of neighbours is on two nodes."""
    one, two = (step(planner, "tp=2,pp=4:1f1b,ddp=2,bf16,mb=1", on) for on in ("16xH100-80GB", "2x8xH100-80GB"))
    assert two["host"] > 1.2 * one["host"]


def test_messages_between_stages_always_stall_beside_an_axis_over_four_nodes(planner: Planner) -> None:
    wide, narrow = (
        step(planner, f"tp={size},pp=2:1f1b,ddp,bf16,mb=8", "16x8xH100-80GB@3200Gbps:efa") for size in (32, 16)
    )
    assert wide["stages"] > EFA.stall * 2 * (2048 // 8 // 2)
    assert narrow["stages"] < EFA.stall


@pytest.mark.parametrize(
    ("link", "ranks", "further"), [("efa", 8, 0), ("efa", 16, 1), ("efa", 32, 3), ("infiniband", 32, 0)]
)
def test_a_tensor_axis_waits_for_each_further_node(link: str, ranks: int, further: int) -> None:
    hardware = hardware_of(Cluster.parse(f"16x8xH100-80GB@3200Gbps:{link}"))
    collective = partial(seconds, hardware=hardware)
    site = Site(
        hardware=hardware, per_node=8, step_layout=StepLayout(micro_batch=1, micro_batches=1), collective=collective
    )
    group = group_on(ranks, 1, 8, 16)
    sent = sending(site, group, (Sent(kind="all_gather", bytes=1e6, times=4),))
    assert sent == pytest.approx(4 * (site.time("all_gather", 1e6, group) + further * EFA.wait))


def test_hosts_of_pipelines_side_by_side_are_later(planner: Planner) -> None:
    one, eight = (
        step(planner, f"tp=8,pp=2:1f1b,{data},bf16,mb=1", cluster)["host"] / (2048 // ranks)
        for data, ranks, cluster in (
            ("ddp=1", 1, "2x8xH100-80GB@3200Gbps:efa"),
            ("ddp=8", 8, "16x8xH100-80GB@3200Gbps:efa"),
        )
    )
    assert 1.1 < eight / one < 1 + 3 * OURS.crowding
