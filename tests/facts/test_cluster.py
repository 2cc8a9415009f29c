import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ClusterError
from meshwright.facts.cluster import Cluster


@pytest.mark.parametrize(
    ("text", "nodes", "devices_per_node", "device", "memory"),
    [
        ("8xA100-40GB", 1, 8, "A100-40GB", 40.0),
        ("4x8xH100-80GB", 4, 8, "H100-80GB", 80.0),
        ("4xcpu", 1, 4, "cpu", None),
        ("2x4xRTX-4090-24GB", 2, 4, "RTX-4090-24GB", 24.0),
        ("8xRTX4090", 1, 8, "RTX4090", None),
        ("1xA100-SXM-80GB", 1, 1, "A100-SXM-80GB", 80.0),
        ("2xGB200-186.5GB", 1, 2, "GB200-186.5GB", 186.5),
        ("8xA100-80GB-PCIe", 1, 8, "A100-80GB-PCIe", 80.0),
        ("local", 1, 1, "local", None),
    ],
)
def test_parse_and_print(text: str, nodes: int, devices_per_node: int, device: str, memory: float | None) -> None:
    cluster = Cluster.parse(text)
    assert cluster == Cluster(nodes=nodes, devices_per_node=devices_per_node, device=device, memory_gib=memory)
    assert cluster.devices == nodes * devices_per_node
    assert str(cluster) == text
    assert Cluster.parse(str(cluster)) == cluster
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


@pytest.mark.parametrize(
    ("text", "canonical"), [("1x8xA100", "8xA100"), (" 8xA100-40gb ", "8xA100-40GB"), ("8xA100-40GiB", "8xA100-40GB")]
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(Cluster.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "gbps", "kind"),
    [
        ("16x8xH100-80GB@3200Gbps", 3200.0, None),
        ("2x8xA100-40GB@400Gbps:roce", 400.0, "roce"),
        ("2x4xcpu@2.5Gbps:ethernet", 2.5, "ethernet"),
    ],
)
def test_the_link_between_nodes(text: str, gbps: float, kind: str | None) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.between_gbps, cluster.between_kind) == (gbps, kind)
    assert str(cluster) == text
    assert Cluster.parse(str(cluster)) == cluster != Cluster.parse(text.split("@")[0])
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_clusters_can_be_keys() -> None:
    one = Cluster(device="cpu", hardware={"launch": 1e-6})
    assert {one: 1}[Cluster(device="cpu", hardware={"launch": 1e-6})] == 1
    assert one != Cluster(device="cpu")


def test_a_measured_memory_is_part_of_the_value() -> None:
    nominal = Cluster.parse("8xA100-40GB")
    measured = Cluster(devices_per_node=8, device="A100-40GB", memory_gib=39.4)
    assert measured != nominal
    assert Cluster.from_json(measured.to_json()) == measured


def test_a_file_round_trips_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    written = Cluster(nodes=2, devices_per_node=4, device="A100-40GB", memory_gib=39.4)
    path.write_text(json.dumps(written.to_json()))
    read = Cluster.parse(str(path))
    assert read == written
    assert str(read) == read.source == str(path)
    assert Cluster.parse(str(read)) == read


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("8*A100", ["'8*A100'", "8xA100-40GB"]),
        ("", ["''", "8xA100-40GB"]),
        ("A100-40GB", ["did you mean '1xA100-40GB'?"]),
        ("0xA100", ["devices_per_node is 0", "8xA100-40GB"]),
        ("0x8xA100", ["nodes is 0"]),
        ("8xA100 40GB", ["'A100 40GB'", "A100-40GB"]),
        ("8xA100-0GB", ["memory_gib is 0.0"]),
        ("4xlocal", ["takes no count"]),
        ("missing.json", ["'missing.json'", "No such file"]),
        ("2x8xA100-40GB@fast", ["'fast'", "@3200Gbps"]),
        ("2x8xA100-40GB@0Gbps", ["between_gbps is 0.0"]),
        ("2x8xA100-40GB@100Gbps:wifi", ["'wifi'", "infiniband, roce, efa, ethernet"]),
    ],
)
def test_bad_text(text: str, parts: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "Cannot read the cluster file"),
        ("[]", "JSON object"),
        ("{}", '"device"'),
        ('{"device": "A100", "gpus": 8}', "'gpus'"),
        ('{"device": 5}', "device 5"),
        ('{"device": "A100", "nodes": "2"}', "nodes is '2'"),
        ('{"device": "A100", "memory_gib": "40"}', "memory_gib is '40'"),
        ('{"device": "A100", "between_kind": "roce"}', "no speed"),
        ('{"device": "A100", "hardware": 3}', "hardware is 3"),
        ('{"device": "A100", "hardware": {"bandwith": 3}}', "did you mean 'bandwidth'?"),
        ('{"device": "A100", "hardware": {"within": {"speed": 3}}}', "hardware.within has no key 'speed'"),
        ('{"device": "A100", "hardware": {"within": {"latency": -1}}}', "hardware.within.latency is -1"),
        ('{"device": "A100", "hardware": {"flops": {"bf16": "fast"}}}', "hardware.flops.bf16 is 'fast'"),
    ],
)
def test_bad_file(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(str(path))
    assert part in str(caught.value)
    assert str(path) in str(caught.value)


def test_from_json_names_an_unknown_key() -> None:
    value: dict[str, Any] = {"device": "A100", "node": 2}
    with pytest.raises(ClusterError, match="'node'"):
        Cluster.from_json(value)
