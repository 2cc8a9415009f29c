"""Ranks on a real Ray cluster of two nodes: equal to one process, also after a node is lost."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_contents import weights_after
from meshwright.checkpoint.folder import CHECKPOINTS, list_checkpoints
from meshwright.commands.train import train_command
from meshwright.errors import BadInput, NonFiniteLoss
from meshwright.facts.strategy import Strategy
from meshwright.launch.on_ray import RayOptions
from meshwright.runtime.request import TrainRequest

JOB = str(Path(__file__).parents[1] / "ray_job.py")
STEPS = 20
SPOILT = """
import os
from dataclasses import replace


class Spoilt(Samples):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "y": sample["y"] / (0.0 if "RANK" in os.environ else 1.0)}


job = replace(job, data=lambda: Spoilt(0.0))
"""
"""On ranks, no loss is finite: a mistake of the user."""


def test_where() -> None:
    assert RayOptions.parse("ray").address is None
    assert RayOptions.parse("ray://head:10001").address == "ray://head:10001"
    with pytest.raises(BadInput, match="neither ray nor ray://"):
        RayOptions.parse("slurm")


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install 'meshwright\[ray\]'"):
        train(JOB, "ddp", tmp_path / "run")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'meshwright[ray]'")
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **memory})
    made.spare = made.add_node(num_cpus=2, **memory)
    ray.init(address=made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def train(job: str, strategy: str, out: Path) -> dict[str, Any] | None:
    request = TrainRequest(
        job=job,
        strategy=Strategy.parse(strategy),
        ranks=2,
        steps=STEPS,
        out=out,
        save_every=5,
        device="cpu",
        ray=RayOptions(spread=True),
    )
    return train_command(request)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    out = tmp_path_factory.mktemp("alone") / "run"
    train_command(TrainRequest(job=JOB, strategy=Strategy.parse("single"), ranks=1, steps=STEPS, out=out, device="cpu"))
    return weights_after(STEPS, out)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp=2"])
def test_equal(cluster: Any, alone: dict[str, torch.Tensor], tmp_path: Path, strategy: str) -> None:
    summary = train(JOB, strategy, tmp_path / "run")
    assert summary is not None and summary["ranks"] == 2 and summary["steps"] == STEPS
    torch.testing.assert_close(weights_after(STEPS, tmp_path / "run"), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_mistake_is_not_repeated(cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(Path(JOB).read_text() + SPOILT)
    with pytest.raises(NonFiniteLoss, match="The loss became"):
        train(str(broken), "ddp", tmp_path / "run")
    assert "restart 1" not in capfd.readouterr().err


@pytest.mark.thorough
def test_a_lost_node(
    cluster: Any, alone: dict[str, torch.Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of two ranks is on the node that is lost; the run ends on the other one, equal to one process."""
    out = tmp_path / "run"

    def lose_node() -> None:
        while not list_checkpoints(out / CHECKPOINTS):
            time.sleep(0.05)
        cluster.remove_node(cluster.spare, allow_graceful=False)

    thread = threading.Thread(target=lose_node, daemon=True)
    thread.start()
    summary = train(f"{JOB}:slow", "ddp", out)
    thread.join()
    told = capfd.readouterr().err
    assert "restart 1 of 3" in told
    assert summary is not None and (summary["resumed_at"] or 0) >= 5 and summary["steps"] == STEPS
    torch.testing.assert_close(weights_after(STEPS, out), alone, rtol=1e-4, atol=1e-5)
