"""A host is killed with everything in it, and the run ends with the parameters of one that nobody disturbed."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hosts import Host, HostsUnavailable, make_hosts, wait_for
from meshwright.runtime.run import setup

TESTS = Path(__file__).parents[1]
STEPS, LIMIT_SECONDS = 60, 180


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        with make_hosts(2) as made:
            yield made
    except HostsUnavailable as error:
        pytest.skip(f"no test hosts: {error}")


def start(host: Host, rank: int, out: Path, *, nodes: str, strategy: str) -> Any:
    command = [sys.executable, "-m", "meshwright", "train", str(TESTS / "elastic_job.py"), "--strategy", strategy]
    command += ["--nodes", nodes, "--node-rank", str(rank), "--rendezvous", "host0:29500", "--ranks", "2"]
    command += ["--steps", str(STEPS), "--save-every", "5", "--out", str(out), "--device", "cpu", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return host.start(command, env={"PYTHONPATH": str(TESTS.parent / "src")}, text=True, **pipes)


def wait_for_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    records = out / "records.jsonl"
    while not records.exists() or sum(1 for _ in records.open()) < step:
        assert time.monotonic() < deadline, f"step {step} was not taken"
        time.sleep(0.1)


def undisturbed() -> dict[str, torch.Tensor]:
    """The parameters after all steps in one process."""
    sys.path.append(str(TESTS))
    from elastic_job import job

    with setup(job, "single", device="cpu") as run:
        for batch in run.batches(steps=STEPS):
            run.step(batch)
        return run.state()


def trained(out: Path) -> dict[str, torch.Tensor]:
    """The parameters of a run's last checkpoint."""
    from elastic_job import job

    with setup(job, "single", device="cpu") as run:
        assert run.load(out).step == STEPS
        return run.state()


def assert_same_parameters(out: Path) -> None:
    wanted, found = undisturbed(), trained(out)
    assert wanted.keys() == found.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_goes_on_without_its_second_host(hosts: list[Host], tmp_path: Path) -> None:
    out = tmp_path / "run"
    near, _ = (start(host, rank, out, nodes="1:2", strategy="hsdp=2x2") for rank, host in enumerate(hosts))
    wait_for_step(out, 12)
    hosts[1].kill()
    assert wait_for([near], LIMIT_SECONDS) == [0]
    summary, words = json.loads(near.stdout.read()), near.stderr.read()
    assert (summary["ranks"], summary["strategy"], summary["steps"]) == (2, "fsdp=2", STEPS)
    assert "hsdp=2x2 does not fit 2 ranks; the run goes on as fsdp=2" in words
    assert_same_parameters(out)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_host_that_comes_back(hosts: list[Host], tmp_path: Path, nodes: str) -> None:
    """The others wait for it, or have gone on without it and take it in again."""
    out = tmp_path / "run"
    near, _ = (start(host, rank, out, nodes=nodes, strategy="fsdp") for rank, host in enumerate(hosts))
    wait_for_step(out, 12)
    hosts[1].kill()
    hosts[1].reboot()
    far = start(hosts[1], 1, out, nodes=nodes, strategy="fsdp")
    assert wait_for([near, far], LIMIT_SECONDS) == [0, 0]
    summary = json.loads(near.stdout.read())
    assert (summary["ranks"], summary["steps"]) == (4, STEPS)
    assert_same_parameters(out)
