"""Launchers on two hosts: ranks that fail on one restart on both, and a host that is lost is told and done without."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import Host, HostsUnavailable, make_hosts, wait_for
from meshwright.errors import BadInput
from meshwright.launch.node_options import node_options

TESTS = Path(__file__).parents[1]
LIMIT_SECONDS = 120


@pytest.fixture(scope="module")
def all_hosts() -> Iterator[list[Host]]:
    try:
        with make_hosts(2) as made:
            yield made
    except HostsUnavailable as error:
        pytest.skip(f"no test hosts: {error}")


@pytest.fixture
def hosts(all_hosts: list[Host]) -> Iterator[list[Host]]:
    """Two hosts without processes."""
    yield all_hosts
    for host in all_hosts:
        host.kill()
        host.reboot()


def start(host: Host, rank: int, does: str, *, nodes: str = "2", restarts: int = 0, patience: float = 0.0) -> Any:
    command = [sys.executable, str(TESTS / "node_launcher.py"), does, nodes, str(rank), str(restarts), str(patience)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return host.start(command, env={"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"}, text=True, **pipes)


def outcomes(launchers: list[Any]) -> list[dict[str, Any]]:
    assert wait_for(launchers, LIMIT_SECONDS) == [0] * len(launchers)
    return [json.loads(launcher.stdout.read()) for launcher in launchers]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rank_killed_on_one_host_restarts_the_ranks_of_both(hosts: list[Host]) -> None:
    launchers = [start(host, rank, "rank_three_is_killed_once", restarts=1) for rank, host in enumerate(hosts)]
    near, far = outcomes(launchers)
    assert near == {"results": [[1, 4]]}  # the second attempt, with all four ranks
    assert far == {"results": []}
    for launcher in launchers:
        assert "host1: Rank 3 was ended by SIGKILL" in launcher.stderr.read()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_mistake_on_one_host_ends_the_run_on_both(hosts: list[Host]) -> None:
    found = outcomes([start(host, rank, "rank_three_loses_its_loss", restarts=3) for rank, host in enumerate(hosts)])
    assert [(one["error"], one["message"]) for one in found] == [("NonFiniteLoss", "The loss became nan.")] * 2


@pytest.mark.slow
def test_a_run_goes_on_without_a_host_that_is_lost(hosts: list[Host]) -> None:
    launchers = [start(host, rank, "waits_unless_alone", nodes="1:2", restarts=1) for rank, host in enumerate(hosts)]
    while "waiting" not in (line := launchers[0].stderr.readline()):
        assert line, "the ranks did not start"
    hosts[1].kill()
    assert outcomes(launchers[:1]) == [{"results": [[1, 2]]}]
    assert "host1 (10.77.0.2, ranks 2, 3) has been silent" in launchers[0].stderr.read()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_ends_when_the_host_of_its_meeting_point_is_lost(hosts: list[Host]) -> None:
    launchers = [start(host, rank, "waits_unless_alone", nodes="1:2", restarts=1) for rank, host in enumerate(hosts)]
    while "waiting" not in (line := launchers[0].stderr.readline()):
        assert line, "the ranks did not start"
    hosts[0].kill()
    (far,) = outcomes(launchers[1:])
    assert far["error"] == "RankFailed" and "host0 (10.77.0.1, ranks 0, 1) has been silent" in far["message"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((None, 1, None), "say how many with --nodes"),
        (("2", None, "127.0.0.1:1"), "needs --node-rank"),
        (("2", 0, None), "needs --rendezvous"),
        (("2", 2, "127.0.0.1:1"), "--node-rank 2 is not below --nodes 2"),
        (("2:1", 0, "127.0.0.1:1"), "--nodes must be a number such as 2"),
        (("two", 0, "127.0.0.1:1"), "--nodes must be a number such as 2"),
        (("2", 0, "node0"), "--rendezvous must be HOST:PORT"),
        (("2", 0, "127.0.0.1:99999"), "--rendezvous must be HOST:PORT"),
        (("2", 0, "nowhere.invalid:29500"), "'nowhere.invalid' has no IPv4 address"),
        (("2", 0, "127.0.0.1:29500"), "which other nodes cannot reach"),
    ],
)
def test_options_that_cannot_work_are_refused(options: tuple[Any, Any, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        node_options(*options, interface=None, wait=1.0)


def test_an_unknown_interface_is_refused() -> None:
    with pytest.raises(BadInput, match="no interface 'nothing0'"):
        node_options("2", 0, "127.0.0.1:29500", interface="nothing0", wait=1.0)


def test_no_options_for_one_machine() -> None:
    assert node_options(None, None, None, interface=None, wait=1.0) is None
