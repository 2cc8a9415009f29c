import json
from pathlib import Path

import pytest

from meshwright.cli.main import app
from meshwright.cli.outcome import main_with_exit_codes
from meshwright.facts.catalogue import hardware_of, is_measured
from meshwright.facts.cluster import Cluster
from meshwright.probe import device

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write into, and measurements that are done at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "CPU_SHAPES", ((32, 32, 32),))
    monkeypatch.setattr(device, "HALF_SHAPES", ((16, 16, 16),))
    monkeypatch.setattr(device, "CPU_COPY", 2**20)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["meshwright", "probe", "--device", "cpu", *words])
    return main_with_exit_codes(app)


def test_the_file_is_a_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert run(monkeypatch, "--out", "here.json", "--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert "probe: matrix products" in captured.err
    assert document["ranks"] == 1 and document["collectives"] == [] and document["links"] == {}
    cluster = Cluster.parse("here.json")
    assert cluster == Cluster.from_json(document["cluster"])
    hardware = hardware_of(cluster)
    assert hardware.bandwidth == document["bandwidth"] and is_measured(hardware, "bandwidth")
    assert set(hardware.flops) == {"fp32", "bf16", "fp16"}
    assert "torch" in hardware.sources["flops"]


def test_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert run(monkeypatch) == 0
    page = capsys.readouterr().out
    for words in ("memory bandwidth", "kernel launch", "TFLOP/s", "32 x 32 x 32"):
        assert words in page
    assert list(folder.iterdir()) == []


def test_a_file_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert run(monkeypatch, "--out", "nowhere/here.json") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --out 'nowhere/here.json'") and captured.err.count("\n") == 1


@pytest.mark.slow
def test_ranks_measure_the_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "--ranks", "2", "--out", "two.json") == 0
    page = capsys.readouterr().out
    assert "all_reduce" in page and "within a node" in page
    hardware = hardware_of(Cluster.parse("two.json"))
    assert Cluster.parse("two.json").devices_per_node == 2
    assert is_measured(hardware, "within.latency")
    assert 1e6 < hardware.within.bandwidth < 1e12
