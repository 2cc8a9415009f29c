import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.hardware import Hardware
from meshwright.facts.links import ring_bytes
from meshwright.planner.collectives import RankGroup, group_on, seconds

MIB = 2**20
PUBLISHED = Path(__file__).parents[2] / ".." / "shared" / "validation" / "collectives.csv"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def hardware(text: str) -> Hardware:
    return hardware_of(Cluster.parse(text))


A100, H100, PCIE = hardware("8xA100-40GB"), hardware("4x8xH100-80GB"), hardware("8xA100-40GB-PCIe")


@pytest.mark.parametrize(
    ("axis", "inner", "devices", "per_node", "nodes", "share"),
    [
        (8, 1, 8, 8, 1, 1.0),  # a tensor axis within a node
        (4, 8, 8, 1, 4, 0.125),  # data ranks outside of it: one a node, and seven other groups beside
        (16, 1, 8, 8, 2, 1.0),  # data ranks without a tensor axis
        (16, 2, 8, 4, 4, 0.5),
        (2, 2, 8, 2, 1, 0.25),
        (4, 1, 1, 1, 4, 1.0),  # nodes of one device
        (2, 16, 8, 1, 2, 0.125),
    ],
)
def test_groups_of_an_axis(axis: int, inner: int, devices: int, per_node: int, nodes: int, share: float) -> None:
    group = group_on(axis, inner, devices)
    assert group == RankGroup(axis, per_node, nodes, devices)
    assert group.share == share


@pytest.mark.parametrize("kind", KINDS)
def test_what_costs_nothing_and_what_costs_more(kind: str) -> None:
    group, farther = RankGroup(8, 8, 1), RankGroup(16, 8, 2)
    assert seconds(kind, 64 * MIB, RankGroup(1, 1, 1), H100) == 0.0
    assert seconds(kind, 0, group, H100) == 0.0
    small, large = seconds(kind, 1e3, group, H100), seconds(kind, 64 * MIB, group, H100)
    assert 5e-6 < small < 1e-4 < large
    assert seconds(kind, 64 * MIB, farther, H100) > large
    assert seconds(kind, 64 * MIB, group, PCIE) > 3 * seconds(kind, 64 * MIB, group, A100)


def test_an_unknown_collective_is_named() -> None:
    with pytest.raises(ValueError, match="'all_gatherr'"):
        seconds("all_gatherr", 1.0, RankGroup(2, 2, 1), A100)
    with pytest.raises(ValueError, match="below 1"):
        RankGroup(0, 1, 1)


def test_small_messages_do_not_reach_the_bandwidth() -> None:
    speeds = [
        ring_bytes("all_reduce", s, 8) / seconds("all_reduce", s, RankGroup(8, 8, 1), A100) for s in (1e5, 1e7, 1e9)
    ]
    assert speeds[0] < 0.1 * speeds[1] < 0.1 * speeds[2]
    assert 0.7 * 300e9 < speeds[2] < 0.77 * 300e9


def test_strided_groups_share_the_node_s_link() -> None:
    """The same bytes a rank: one ring through 8 ranks of a node goes as fast as 8 rings through one each."""
    one_ring = seconds("all_gather", 8e9, group_on(32, 1, 8), H100)
    each_of_eight = seconds("all_gather", 1e9, group_on(4, 8, 8), H100)
    alone_on_its_node = seconds("all_gather", 1e9, group_on(4, 1, 1), H100)
    assert each_of_eight == pytest.approx(one_ring, rel=0.3)
    assert each_of_eight == pytest.approx(8 * alone_on_its_node, rel=0.05)


def test_trees_make_many_nodes_affordable() -> None:
    group = group_on(512, 1, 8)
    all_reduce, halves = (seconds(kind, MIB, group, H100) for kind in ("all_reduce", "all_gather"))
    assert all_reduce < 0.5 * halves  # a ring passes 511 hops, a tree 6 up and 6 down


def test_a_switch_that_adds_beats_a_ring() -> None:
    group = RankGroup(8, 8, 1)
    assert 460e9 < ring_bytes("all_reduce", 8e9, 8) / seconds("all_reduce", 8e9, group, H100) < 490e9
    assert ring_bytes("all_gather", 8e9, 8) / seconds("all_gather", 8e9, group, H100) < 370e9


def test_an_all_to_all_leaves_through_the_rank_s_own_adapter() -> None:
    speed = 1e9 / seconds("all_to_all", 1e9, group_on(64, 1, 8), H100)
    assert 45e9 < speed * 56 / 64 < 50e9  # 400 Gbit/s for each device


def test_measured_links_are_taken_at_their_word() -> None:
    said = {"within": {"bandwidth": 100e9, "latency": 1e-5}, "sources": {"within.bandwidth": "measured by probe"}}
    measured = hardware_of(Cluster(device="A100-40GB", hardware=said))
    assumed = hardware_of(Cluster(device="A100-40GB", hardware={**said, "sources": {}}))
    group = RankGroup(2, 2, 1)
    assert seconds("all_gather", 20e9, group, measured) == pytest.approx(0.1, rel=1e-3)
    assert seconds("all_gather", 20e9, group, assumed) == pytest.approx(0.1 / 0.77, rel=1e-3)


def published() -> Iterator[tuple[str, str, float]]:
    """GPU, collective, and how far the cost lies from what was measured, relative."""
    known = {"A100": A100, "V100": hardware("8xV100-16GB"), "H100": hardware("8xH100-80GB@3200Gbps:efa")}
    with PUBLISHED.open() as file:
        for row in csv.DictReader(file):
            ranks, nodes, size = int(row["n_gpus"]), int(row["nodes"]), float(row["size_bytes"])
            truth = ring_bytes(row["op"], size, ranks) / (float(row["busbw_gb_s"]) * 1e9)
            cost = seconds(row["op"], size, RankGroup(ranks, ranks // nodes, nodes), known[row["gpu"]])
            yield row["gpu"], row["op"], cost / truth - 1


@pytest.mark.parametrize(
    ("gpu", "kind", "usual", "worst"),
    [
        ("A100", "all_reduce", 0.09, 0.35),
        ("V100", "all_reduce", 0.05, 0.30),
        ("H100", "all_reduce", 0.22, 0.45),
        ("H100", "all_gather", 0.20, 0.30),
        ("H100", "reduce_scatter", 0.20, 0.30),
    ],
)
def test_against_published_measurements(gpu: str, kind: str, usual: float, worst: float) -> None:
    if not PUBLISHED.exists():
        pytest.skip("the published measurements are not beside this checkout (../shared/validation)")
    errors = [abs(error) for a_gpu, a_kind, error in published() if (a_gpu, a_kind) == (gpu, kind)]
    assert len(errors) >= 7
    assert median(errors) < usual
    assert max(errors) < worst


def test_gloo_reduces_and_scatters_by_an_all_reduce() -> None:
    cpu, pair = hardware("2x1xcpu@1Gbps:ethernet"), RankGroup(2, 1, 2, 1)
    assert seconds("reduce_scatter", 16 * MIB, pair, cpu) == seconds("all_reduce", 16 * MIB, pair, cpu)
    assert seconds("reduce_scatter", 16 * MIB, pair, H100) < seconds("all_reduce", 16 * MIB, pair, H100)
