"""Hosts made of namespaces: their links have the rate that was set, and a killed host leaves nothing behind."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from hosts import Host, HostsUnavailable, make_hosts, wait_for

RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
client, _ = server.accept()
received, first = 0, None
while data := client.recv(1 << 20):
    received, first = received + len(data), first or time.perf_counter()
print(8e-9 * received / (time.perf_counter() - first))
"""
SEND = "import socket; socket.create_connection(('host0', 5000)).sendall(bytes(12_500_000))"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    try:
        with make_hosts(3) as made:
            yield made
    except HostsUnavailable as error:
        pytest.skip(f"no test hosts: {error}")


def test_a_link_has_the_rate_that_was_set(hosts: list[Host]) -> None:
    for host in hosts[:2]:
        host.limit(0.2)
    receiver = hosts[0].start([sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "listening\n"
    sender = hosts[1].start([sys.executable, "-c", SEND])
    assert wait_for([receiver, sender], 30) == [0, 0]
    # Nothing can be faster than the link; on a busy machine it may be slower.
    assert 0.05 < float(receiver.stdout.read()) < 0.22


def test_a_killed_host_takes_its_processes_and_comes_back(hosts: list[Host]) -> None:
    host = hosts[2]
    sleeper = host.start(["sleep", "1000"])
    host.kill()
    assert sleeper.returncode not in (None, 0)
    host.reboot()
    assert host.run("hostname") == "host2\n"
    assert "10.77.0.3" in host.run("ip", "-4", "address", "show", "dev", "eth0")


def test_hosts_do_not_touch_the_network_of_the_machine(hosts: list[Host]) -> None:
    listing = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
    assert "10.77.0." not in listing


def test_the_reason_is_told_where_no_host_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HostsUnavailable, match="not installed: ip, tc"), make_hosts(1):
        pass
