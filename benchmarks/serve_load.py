"""`meshwright serve` under load: so many requests for plans over so many connections, and what its memory does.

    python benchmarks/serve_load.py --requests 1000 --connections 20
    python benchmarks/serve_load.py --requests 160 --connections 20 --settings 160
    python benchmarks/serve_load.py --requests 1000 --connections 20 --idle 300

The server is started on this machine for the run and called on its loopback address only. Requests go through a few
settings of the knobs in turn, as visitors who turn them would; each setting is planned once and then kept. Memory is
read between quarters of the run, of the server and of its planning process together.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from urllib.parse import urlsplit

import psutil

QUARTERS = 4
PATIENCE = 120.0
DEVICES = ("A100-40GB", "H100-80GB")
SHARES = {"median": 0.5, "p95": 0.95, "largest": 1.0}


def knobs(number: int) -> dict[str, object]:
    """The setting of a number; no two are alike."""
    plain = {"model": "preset:gpt2", "pipeline": False, "offload": ["none"]}
    return plain | {"device": DEVICES[number % 2], "devices": 2 << number // 2 % 3, "batch": 64 * (1 + number // 6)}


@dataclass
class Seen:
    """What visitors got."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float, error: str) -> None:
        with self.lock:
            self.seconds.append(seconds)
            if error:
                self.errors.append(error)


@contextmanager
def running_server() -> Iterator[tuple[str, psutil.Process]]:
    """The server's address and process."""
    command = [sys.executable, "-m", "meshwright", "serve", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield urlsplit(json.loads(server.stdout.readline())["url"]).netloc, psutil.Process(server.pid)
        server.terminate()


def visit(place: str, numbers: list[int], seen: Seen) -> None:
    """One visitor: requests one after the other over one connection."""
    connection = HTTPConnection(place, timeout=PATIENCE)
    for number in numbers:
        started, error = time.perf_counter(), ""
        try:
            body = json.dumps(knobs(number))
            connection.request("POST", "/api/plan", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read())
            error = "" if answer.status == 200 and found["plans"] else f"{answer.status} {found.get('error')}"
        except (OSError, ValueError) as problem:
            error = repr(problem)
            connection.close()
        seen.add(time.perf_counter() - started, error)
    connection.close()


@contextmanager
def idle_connections(place: str, count: int) -> Iterator[None]:
    """Visitors who open connections and say nothing, every third half a request."""
    host, _, port = place.partition(":")
    with ExitStack() as opened:
        for number in range(count):
            connection = opened.enter_context(socket.create_connection((host, int(port))))
            if number % 3 == 0:
                connection.sendall(b"POST /api/plan HTTP/1.1\r\nHost: ")
        yield


def load(place: str, numbers: list[int], connections: int, seen: Seen) -> None:
    """Requests for settings of these numbers, divided among the connections."""
    visitors = [
        threading.Thread(target=visit, args=(place, numbers[start::connections], seen)) for start in range(connections)
    ]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()


def resident(server: psutil.Process) -> float:
    """MiB of the server and all processes that it started."""
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True))) / 2**20


def measure(requests: int, connections: int, settings: int, idle: int) -> dict[str, object]:
    seen, memory, started = Seen(), [], time.perf_counter()
    with running_server() as (place, server):
        for quarter in range(QUARTERS):
            first, last = quarter * requests // QUARTERS, (quarter + 1) * requests // QUARTERS
            with idle_connections(place, idle):
                load(place, [number % settings for number in range(first, last)], connections, seen)
            memory.append(round(resident(server), 1))
    ordered = sorted(seen.seconds)
    return {
        "requests": len(ordered),
        "connections": connections,
        "settings": settings,
        "idle": idle,
        "errors": seen.errors,
        "seconds": round(time.perf_counter() - started, 1),
        "ms": {name: round(1e3 * ordered[int(share * (len(ordered) - 1))], 1) for name, share in SHARES.items()},
        "mib": memory,
        "growth": memory[-1] / memory[0] - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=20)
    parser.add_argument("--settings", type=int, default=24, help="Settings of the knobs that are gone through in turn.")
    parser.add_argument(
        "--idle", type=int, default=0, help="Connections beside them without a request, or half of one."
    )
    given = parser.parse_args()
    print(json.dumps(measure(given.requests, given.connections, given.settings, given.idle), indent=2))


if __name__ == "__main__":
    main()
