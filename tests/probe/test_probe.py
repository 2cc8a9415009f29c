"""The parts of `probe` that need no ranks, and its measurements on two of the pool's."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.assemble.world import World
from meshwright.errors import BadInput, OutputError
from meshwright.facts.catalogue import hardware_of, is_measured
from meshwright.facts.cluster import Cluster
from meshwright.facts.links import GLOO, ring_bytes, ring_steps
from meshwright.probe import collectives, machine
from meshwright.probe import device as probe_device
from meshwright.probe.collectives import fit_link, layouts
from meshwright.probe.device import measure_launch, measure_matmuls, measure_memory, time_of
from meshwright.probe.machine import local_cluster
from meshwright.probe.probe import cluster_of, fit_links, probe_command
from meshwright.runtime.request import ProbeRequest
from meshwright.units import GIB
from rank_pool import RankPool

CPU = torch.device("cpu")


def rows(
    latency: float, bandwidth: float, *, nodes: int = 1, per_node: int = 4, share: float = 1.0, gloo: bool = False
) -> list[dict]:
    """What a link with these numbers would give; gloo all-reduces where it is to reduce and scatter."""
    ranks = nodes * per_node
    place = {"ranks": ranks, "per_node": per_node, "nodes": nodes}
    found = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "send"):
        runs = GLOO.get(kind, kind) if gloo else kind
        for size in (2**14, 2**20, 2**26):
            seconds = ring_steps(runs, ranks) * latency + ring_bytes(runs, size, ranks) / (bandwidth * share)
            found.append({**place, "kind": kind, "bytes": size, "seconds": seconds, "bus": 0.0})
    return found


def test_a_fit_finds_the_link_again() -> None:
    fit = fit_link(rows(2e-5, 1e10))
    assert fit is not None and fit.rows == 9
    assert (fit.latency, fit.bandwidth) == pytest.approx((2e-5, 1e10), rel=1e-6)
    assert fit.error < 1e-9


def test_a_fit_bears_noise_and_no_rows() -> None:
    noisy = [{**row, "seconds": row["seconds"] * (1.1 if i % 2 else 0.9)} for i, row in enumerate(rows(2e-5, 1e10))]
    fit = fit_link(noisy)
    assert fit is not None
    assert (fit.latency, fit.bandwidth) == pytest.approx((2e-5, 1e10), rel=0.25)
    assert 0.01 < fit.error < 0.2
    assert fit_link([]) is None
    flat = fit_link([{**row, "seconds": 1e-3} for row in rows(1.0, 1.0)])
    assert flat is not None and flat.latency > 0 and flat.bandwidth > 0


def test_links_within_and_between_nodes_are_told_apart() -> None:
    world = World(ranks=8, local_ranks=4, device=CPU)
    # Strided groups have three others on the node's link.
    strided = rows(5e-5, 4e9, nodes=2, per_node=1, share=0.25, gloo=True)
    links = fit_links([*rows(1e-5, 1e10, gloo=True), *rows(5e-5, 4e9, nodes=2, gloo=True), *strided], world)
    assert links["within"]["bandwidth"] == pytest.approx(1e10, rel=1e-6)
    assert links["between"]["bandwidth"] == pytest.approx(4e9, rel=1e-6)
    assert links["between"]["latency"] == pytest.approx(5e-5, rel=1e-6)


def test_layouts() -> None:
    assert layouts(2) == {"all": [[0, 1]]}
    assert layouts(4)["strided"] == [[0, 2], [1, 3]]
    assert layouts(4)["consecutive"] == [[0, 1], [2, 3]]


def test_slow_calls_are_not_repeated() -> None:
    calls = []
    time_of(lambda: calls.append(0), CPU, budget=1.0, agree=lambda once: 2.0)
    assert len(calls) == 3  # one that does not count, and a second look at the one that was slow


def test_one_disturbance_does_not_count() -> None:
    """A lost packet makes one call of a small message last as long as a large one."""
    seen = iter([2.0, 1e-3])
    assert time_of(lambda: None, CPU, budget=0.3, agree=lambda once: next(seen)) < 0.3


def test_a_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_device, "CPU_SHAPES", ((64, 32, 16), (64, 64, 64)))
    monkeypatch.setattr(probe_device, "HALF_SHAPES", ((16, 16, 16),))
    monkeypatch.setattr(probe_device, "CPU_COPY", 2**16)
    found = measure_matmuls(CPU)
    assert [(row["dtype"], row["shape"]) for row in found] == [
        *(("fp32", [64, 32, 16]), ("fp32", [64, 64, 64])),
        *(("bf16", [16, 16, 16]), ("fp16", [16, 16, 16])),
    ]
    assert all(row["flops"] > 0 for row in found)
    assert measure_memory(CPU) > 0
    assert 0 < measure_launch(CPU) < 1


def test_larger_products_are_left_out_where_a_small_one_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_device, "time_of", lambda action, device: 1.0)
    assert [row["dtype"] for row in measure_matmuls(CPU)] == ["fp32", "bf16", "fp16"]


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: 64 * GIB)
    cluster = local_cluster("cpu", devices=4)
    assert (cluster.devices_per_node, cluster.device, cluster.memory_gib) == (4, "cpu", 16.0)
    hardware = hardware_of(cluster)
    assert (hardware.memory, hardware.host_memory) == (16 * GIB, 64 * GIB)
    assert local_cluster("cpu").devices_per_node >= 1


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """Makes torch see two GPUs of a name."""

    def pretend(name: str, gib: float) -> None:
        properties = SimpleNamespace(name=name, total_memory=int(gib * GIB))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    return pretend


def test_a_machine_with_known_gpus(gpus: Callable[[str, float], None]) -> None:
    gpus("NVIDIA A100-SXM4-40GB", 39.38)
    cluster = local_cluster()
    assert (cluster.devices_per_node, cluster.device) == (2, "A100-40GB")
    assert hardware_of(cluster).memory == int(39.38 * GIB)
    assert hardware_of(cluster).within.kind == "nvlink"


def test_a_machine_with_gpus_that_nobody_knows(gpus: Callable[[str, float], None]) -> None:
    gpus("NVIDIA Abacus 9", 11.0)
    cluster = local_cluster()
    assert cluster.device == "Abacus-9"
    assert hardware_of(Cluster.from_json(cluster.to_json())).memory == 11 * GIB
    assert "assumed" in hardware_of(cluster).sources["flops"]


def test_what_was_measured_replaces_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: 64 * GIB)
    document = {
        **{"machine": "a test", "torch": "2.x", "bandwidth": 1e10, "launch": 1e-6, "host": None},
        "matmul": [{"dtype": "fp32", "shape": [1, 1, 1], "flops": flops} for flops in (1e9, 3e9, 2e9)],
        "links": {"within": {"bandwidth": 5e9, "latency": 1e-4, "error": 0.1, "rows": 9}},
    }
    cluster = cluster_of(document, World(ranks=2, local_ranks=2, device=CPU))
    hardware = hardware_of(Cluster.from_json(cluster.to_json()))
    assert cluster.devices_per_node == 2
    assert (hardware.flops["fp32"], hardware.bandwidth, hardware.launch) == (3e9, 1e10, 1e-6)
    assert (hardware.within.kind, hardware.within.bandwidth) == ("shared-memory", 5e9)
    assert is_measured(hardware, "within.bandwidth") and is_measured(hardware, "flops")
    assert not is_measured(hardware, "between.bandwidth")


def test_collectives_are_measured_on_ranks(two_ranks: RankPool) -> None:
    by_rank = two_ranks(measured_collectives)
    assert by_rank[0] == by_rank[1]
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
    assert [(row["kind"], row["bytes"]) for row in by_rank[0]] == [(kind, 4096) for kind in kinds]
    for row in by_rank[0]:
        assert (row["ranks"], row["per_node"], row["nodes"], row["layout"]) == (2, 2, 1, "all")
        assert row["bus"] == pytest.approx(ring_bytes(row["kind"], 4096, 2) / row["seconds"])


def measured_collectives(world: World) -> list[dict]:
    collectives.CPU_SIZES = (4096,)
    return list(collectives.measure_collectives(world))


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"device": "tpu"}, BadInput, "'tpu'"),
        ({"out": Path("cluster.yaml")}, OutputError, "cluster.yaml"),
        ({"out": Path("nowhere/cluster.json")}, OutputError, "in an existing folder"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(asked: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        probe_command(ProbeRequest(**{"device": "cpu", **asked}))
