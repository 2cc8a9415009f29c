import json
from pathlib import Path

import pytest

from meshwright.errors import ClusterError
from meshwright.facts.catalogue import catalogue_names, hardware_of, hardware_of_device, is_measured, name_of_gpu
from meshwright.facts.cluster import Cluster
from meshwright.facts.hardware import Hardware
from meshwright.facts.links import BETWEEN_KINDS, KINDS
from meshwright.units import GIB


@pytest.mark.parametrize("name", catalogue_names())
def test_every_device_is_whole_and_every_number_has_a_source(name: str) -> None:
    hardware = hardware_of(Cluster(devices_per_node=8, device=name))
    assert Hardware.from_json(json.loads(json.dumps(hardware.to_json()))) == hardware
    nominal = Cluster(device=name).memory_gib
    assert nominal is None or 0.9 * nominal < hardware.memory / GIB < nominal
    assert hardware.flops["fp32"] <= max(hardware.flops.values())
    assert hardware.within.kind in KINDS and hardware.between.kind in BETWEEN_KINDS
    links = {f"{link}.{part}" for link in ("within", "between", "host") for part in ("bandwidth", "latency")}
    reach = {"reach"} if hardware.reach else set()
    assert set(hardware.sources) == {"memory", "flops", "bandwidth", "launch", "host_memory"} | links | reach
    assert all(hardware.sources.values())


def test_units_that_a_device_has_not_are_left_out() -> None:
    for name in ("T4", "V100-16GB", "V100-32GB-PCIe"):
        assert "bf16" not in hardware_of_device(name).flops
    assert hardware_of_device("H100-80GB").flops["bf16"] == 989e12


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("A100-SXM-80GB", "A100-80GB"),
        ("a100-40GB", "A100-40GB"),
        ("A100-80GB-pcie", "A100-80GB-PCIe"),
        ("H200", "H200-141GB"),
        ("H100", "H100-80GB"),
        ("RTX4090", "RTX-4090"),
        ("RTX-4090-24GB", "RTX-4090"),
    ],
)
def test_names_as_users_write_them(written: str, known: str) -> None:
    hardware = hardware_of(Cluster(device=written))
    assert hardware.flops == hardware_of_device(known).flops
    assert hardware.memory == hardware_of_device(known).memory
    assert hardware.within == hardware_of_device(known).within


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("H100-94GB", "did you mean 'H100-96GB'?"),
        ("RTX-4080", "did you mean 'RTX-4090'?"),
        ("A100", "it comes as A100-40GB, A100-80GB, A100-40GB-PCIe, A100-80GB-PCIe: choose one"),
        ("V100", "V100-16GB, V100-32GB"),
        ("Abacus", "meshwright probe --out"),
        ("local", "local_cluster()"),
    ],
)
def test_unknown_devices(device: str, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        hardware_of(Cluster(device=device))
    assert says in str(caught.value)


def test_the_text_says_the_link_between_nodes() -> None:
    plain = hardware_of(Cluster.parse("4x8xH100-80GB"))
    slower = hardware_of(Cluster.parse("4x8xH100-80GB@400Gbps"))
    other = hardware_of(Cluster.parse("4x8xH100-80GB@400Gbps:efa"))
    assert plain.between.bandwidth == 400e9
    assert slower.between.bandwidth == other.between.bandwidth == 50e9
    assert (slower.between.kind, other.between.kind) == ("infiniband", "efa")
    assert other.between.latency > slower.between.latency
    assert slower.within == plain.within


def test_a_file_replaces_any_part(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    hardware = {
        "flops": {"bf16": 250e12},
        "within": {"bandwidth": 190e9},
        "launch": 4e-6,
        "sources": {"within.bandwidth": "measured by hand"},
    }
    path.write_text(json.dumps({"devices_per_node": 4, "device": "A100-40GB", "hardware": hardware}))
    found, nominal = hardware_of(Cluster.parse(str(path))), hardware_of_device("A100-40GB")
    assert found.flops == {**nominal.flops, "bf16": 250e12}
    assert (found.within.kind, found.within.bandwidth, found.within.latency) == ("nvlink", 190e9, 4e-6)
    assert (found.launch, found.bandwidth, found.memory) == (4e-6, nominal.bandwidth, nominal.memory)
    assert is_measured(found, "within.bandwidth") and not is_measured(found, "within.latency")
    assert found.sources["launch"] == "the cluster's file"


def test_a_file_that_says_all_needs_no_catalogue() -> None:
    everything = hardware_of_device("A10").to_json()
    assert hardware_of(Cluster(device="Abacus", hardware=everything)).flops == everything["flops"]
    del everything["host"]["latency"]
    with pytest.raises(ClusterError, match="no device 'Abacus'"):
        hardware_of(Cluster(device="Abacus", hardware=everything))


def test_a_memory_that_is_not_the_name_s_counts() -> None:
    assert hardware_of(Cluster(device="A100-40GB", memory_gib=38.5)).memory == round(38.5 * GIB)


@pytest.mark.parametrize(
    ("driver", "gib", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40GB-PCIe"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80GB"),
        ("NVIDIA H100 PCIe", 79.1, "H100-80GB-PCIe"),
        ("NVIDIA H200", 139.8, "H200-141GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("Tesla T4", 14.7, "T4"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX-4090"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("AMD Instinct MI300X", 191.7, "MI300X-192GB"),
        ("NVIDIA H100 NVL", 93.1, None),
        ("Quadro P400", 2.0, None),
    ],
)
def test_names_of_drivers(driver: str, gib: float, known: str | None) -> None:
    assert name_of_gpu(driver, int(gib * GIB)) == known
