"""Two hosts of two ranks, joined by Slurm's variables, train as one process does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import HostsUnavailable, make_hosts, slurm_variables, wait_for

TESTS = Path(__file__).parents[1]
STRATEGIES = ("ddp", "fsdp", "hsdp=2x2", "tp=2,fsdp", "pp=2:1f1b,ddp")
LIMIT_SECONDS = 300


@pytest.mark.slow
@pytest.mark.thorough
def test_strategies_over_two_hosts_equal_one_process() -> None:
    named = [word for strategy in STRATEGIES for word in ("--strategies", strategy)]
    job = str(TESTS / "elastic_job.py")
    command = [sys.executable, "-m", "meshwright", "verify", job, *named, "--device", "cpu", "--json"]
    try:
        with make_hosts(2) as hosts:
            ranks = []
            for rank in range(4):
                env = {**slurm_variables(rank), "PYTHONPATH": str(TESTS.parent / "src")}
                ranks.append(hosts[rank // 2].start(command, env=env, stdout=subprocess.PIPE, text=True))
            assert wait_for(ranks, LIMIT_SECONDS) == [0] * 4
            results = json.loads(ranks[0].stdout.read())["results"]
    except HostsUnavailable as error:
        pytest.skip(f"no test hosts: {error}")
    verdicts = {result["strategy"]: result["equal"] for result in results}
    assert verdicts == dict.fromkeys(("single", *STRATEGIES), True)
