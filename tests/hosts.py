"""Hosts for tests and benchmarks: Linux namespaces on one machine, joined by a switch with links of a set rate.

    with make_hosts(2, gigabits=1.0) as hosts:
        ranks = [host.start([sys.executable, "program.py", hosts[0].address]) for host in hosts]
        hosts[1].kill()

A host has its own network, processes, name and shared memory; it shares the file system. A process outside of it, which
reads from a pipe, keeps it alive: when the pipe closes, even because the test was killed, the kernel ends all processes
of the host and removes its links. Nothing is named in the system, and the machine's own network is not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

DEVICE = "eth0"
"""The name of a host's only interface beside loopback."""
LIMIT_SECONDS = 20
_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "taskset")
_OWN = ("--net", "--pid", "--uts", "--ipc", "--mount")


class HostsUnavailable(Exception):
    """Namespaces cannot be made here, for the reason in the message."""


class Namespace:
    """Namespaces that exist as long as their first process, which ends with this object or with this process."""

    def __init__(self, set_up: str) -> None:
        """`set_up`: shell commands that run in it first, each of which must succeed."""
        script = f"set -e\n{set_up}\necho ready\nexec cat"
        command = ["unshare", *_OWN, "--fork", "--kill-child=KILL", "--mount-proc", "sh", "-c", script]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._holder = subprocess.Popen(command, **pipes, start_new_session=True)  # type: ignore[call-overload]
        if self._holder.stdout.readline() != b"ready\n":
            reason = self._holder.stderr.read().decode().strip()
            self.end()
            raise HostsUnavailable(reason or "unshare failed and said nothing")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.pid = int(children[0])
        """The first process, as this process sees it."""

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` inside."""
        return ["nsenter", "--target", str(self.pid), *_OWN, "--wdns=" + os.getcwd(), "--", *command]

    def run(self, *command: str) -> str:
        return _run(*self.command(command))

    def end(self) -> None:
        """End the namespaces with all of their processes."""
        self._holder.kill()  # the kernel then kills its child, which is the first process inside
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            pipe.close()


class Host(Namespace):
    """One host of a network: start processes in it, limit or cut its link, or kill it with everything in it."""

    def __init__(self, index: int, switch: Namespace, names: Path, cores: Sequence[int]) -> None:
        self.name, self.address = f"host{index}", f"10.77.0.{index + 1}"
        self._index, self._switch, self._names, self._cores = index, switch, names, cores
        self._processes: list[subprocess.Popen[Any]] = []
        self._gigabits = 0.0
        self._boot()

    def _boot(self) -> None:
        super().__init__(
            f"hostname {self.name}\nip link set lo up\nmount --bind {self._names} /etc/hosts\n"
            # No name server can be reached: with an empty list, an unknown name fails at once.
            "if [ -e /etc/resolv.conf ]; then mount --bind /dev/null /etc/resolv.conf; fi\n"
            "mount -t tmpfs none /dev/shm"
        )
        self._port = f"port{self._index}"
        with suppress(subprocess.CalledProcessError):  # the port of a killed host disappears a moment after it
            self._switch.run("ip", "link", "delete", self._port)
        _run(
            *("ip", "link", "add", "name", self._port, "netns", str(self._switch.pid), "type", "veth"),
            *("peer", "name", DEVICE, "netns", str(self.pid)),
        )
        self._switch.run("ip", "link", "set", self._port, "master", "switch", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", DEVICE)
        self.run("ip", "link", "set", DEVICE, "up")

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **popen: Any) -> Any:
        """Start a process on this host; it ends with the host at the latest."""
        environment = {**os.environ, **(env or {})}
        pinned = ["taskset", "--cpu-list", ",".join(map(str, self._cores)), *command]
        process = subprocess.Popen(self.command(pinned), env=environment, stdin=subprocess.DEVNULL, **popen)
        self._processes.append(process)
        return process

    def limit(self, gigabits: float) -> None:
        """Limit what the host sends and what it receives; 0 lifts the limit."""
        self._gigabits = gigabits
        _limit(self, DEVICE, gigabits)
        _limit(self._switch, self._port, gigabits)

    def limit_loopback(self, gigabits: float) -> None:
        """Limit what processes of the host send to one another, all of them together; 0 lifts the limit."""
        _limit(self, "lo", gigabits)

    def cut(self) -> None:
        """Unplug the link: packets are lost in both directions, and connections stay open."""
        self._switch.run("ip", "link", "set", self._port, "down")

    def join(self) -> None:
        """Plug the link in again."""
        self._switch.run("ip", "link", "set", self._port, "up")

    def kill(self) -> None:
        """Take the power away: peers hear nothing more, and every process of the host is gone."""
        self.cut()
        self.end()

    def reboot(self) -> None:
        """Start a killed host again, with no processes, and its link as it was."""
        self._boot()
        self.limit(self._gigabits)

    def end(self) -> None:
        super().end()
        for process in self._processes:
            process.wait(LIMIT_SECONDS)
        self._processes.clear()


@contextmanager
def make_hosts(count: int, *, gigabits: float = 0.0, own_cores: bool = False) -> Iterator[list[Host]]:
    """`count` hosts on one switch, each with a full-duplex link of this rate; 0: no limit.

    With `own_cores`, the cores of this machine are divided among them; otherwise all hosts share all of them.
    Raises `HostsUnavailable` with the reason if this machine or this user cannot make namespaces.
    """
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise HostsUnavailable(f"not installed: {', '.join(missing)}")
    with ExitStack() as stack:
        names = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-"))) / "hosts"
        lines = [f"10.77.0.{index + 1} host{index}" for index in range(count)]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        switch = Namespace("ip link add name switch type bridge\nip link set switch up")
        stack.callback(switch.end)
        hosts: list[Host] = []
        everyone = sorted(os.sched_getaffinity(0))
        if own_cores and len(everyone) < count:
            raise HostsUnavailable(f"{count} hosts need a core each, and there are {len(everyone)}")
        for index in range(count):
            try:
                cores = everyone[index::count] if own_cores else everyone
                hosts.append(Host(index, switch, names, cores))
            except subprocess.CalledProcessError as error:
                raise HostsUnavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
            stack.callback(hosts[-1].end)
            hosts[-1].limit(gigabits)
        yield hosts


def slurm_variables(rank: int, *, nodes: int = 2, per_node: int = 2) -> dict[str, str]:
    """What srun sets for a task of a step on these hosts."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_STEP_NODELIST": f"host[0-{nodes - 1}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_JOB_ID": "7",
        "OMP_NUM_THREADS": "1",
    }


def wait_for(processes: Sequence[subprocess.Popen[Any]], seconds: float) -> list[int]:
    """Exit codes once all have ended; a `TimeoutError` names those that have not after `seconds`."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            late = [index for index, process in enumerate(processes) if process.poll() is None]
            raise TimeoutError(f"processes {late} had not ended after {seconds:g} s")
        time.sleep(0.05)
    return [process.returncode for process in processes]


def _limit(namespace: Namespace, device: str, gigabits: float) -> None:
    with suppress(subprocess.CalledProcessError):  # there was no limit
        namespace.run("tc", "qdisc", "delete", "dev", device, "root")
    if gigabits:
        # The bucket holds a millisecond of traffic, and at least a segment as large as the kernel sends.
        burst = f"{max(128_000, int(gigabits * 1e9 / 8 * 1e-3))}b"
        bucket = ("tbf", "rate", f"{gigabits * 1e3:.0f}mbit", "burst", burst, "latency", "50ms")
        namespace.run("tc", "qdisc", "add", "dev", device, "root", *bucket)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_SECONDS)
    return done.stdout
