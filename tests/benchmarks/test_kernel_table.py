"""A grid of kernels that was measured on this CPU, as a table that ships: plans interpolate from it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import kernel_table

import tiny_jobs
from meshwright.api import job_planner
from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.kernel_table import KernelTable, shipped_table, write_tables
from meshwright.facts.strategy import Strategy
from meshwright.planner.search import consider
from meshwright.probe.measure_kernels import measure_kernels

CPU = torch.device("cpu")


class Once:
    """A clock that runs everything once, and says a millisecond."""

    def once(self, run: Callable[[], Any], size: int) -> float:
        run()
        return 1e-3


@pytest.fixture(scope="module")
def table() -> KernelTable:
    found = measure_kernels(kernel_table.grid(CPU, tiny=True), CPU, clock=Once())
    assert found.failed == {}
    return KernelTable(device="cpu", machine="made up", torch="2.13.0", launch=1e-5, kernels=tuple(found.kernels))


def test_the_grid_has_every_family_forward_and_backward(table: KernelTable) -> None:
    names = {kernel.name for kernel in table.kernels}
    assert {"mm", "bmm", "convolution", "convolution_backward", "gelu", "gelu_backward", "native_layer_norm"} <= names
    assert {"_scaled_dot_product_flash_attention_for_cpu"} <= names
    assert any("attention" in name and name.endswith("backward") for name in names)
    dims = {kernel.signature.count(",") for kernel in table.kernels if kernel.name == "convolution"}
    assert len(dims) >= 3


def test_a_plan_interpolates_from_a_shipped_table(
    table: KernelTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tables(tmp_path / "cpu.json", [replace(table, host=1.0, step=1.0)])
    job = tiny_jobs.convolutions
    strategy, cluster = Strategy.parse("single,fp32"), Cluster.parse("1xcpu")

    def plan() -> Any:
        planner = Planner(job, describe(job), job.global_batch)
        planner.measure("fp32", "none")
        return consider(planner.context(cluster), strategy)

    before = plan()
    assert not before.kernels
    monkeypatch.setattr(job_planner, "shipped_table", lambda device: shipped_table(device, tmp_path))
    after = plan()
    assert after.kernels["interpolated"] > 0.9
    assert after.forecast.time["compute"] > before.forecast.time["compute"]
    assert after.forecast.time["host"] == before.forecast.time["host"]
