"""Cleans up after a launcher that was killed: a small process that outlives it, ends what it started, and goes.

    python janitor.py FOLDER VARIABLE

The launcher holds the other end of its stdin. When that closes and FOLDER is still there, the launcher did not end by
itself: every process with VARIABLE=FOLDER in its environment, ranks and what they started, is killed, and FOLDER
removed. Imports nothing but the standard library, and runs without `site`, so it starts in milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_LIMIT_S = 10.0


@contextmanager
def cleaned_up_after(folder: Path, variable: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Have a janitor with this environment while the block runs. The block's own end must remove the folder."""
    command = [sys.executable, "-I", "-S", __file__, str(folder), variable]
    janitor = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,  # what ends the launcher's group, as a terminal does, must not end it
    )
    try:
        yield
    finally:
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait()


def main(folder: Path, variable: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _LIMIT_S
    while folder.exists() and time.monotonic() < deadline:
        _kill_processes(f"{variable}={folder}".encode())
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)  # a process that is being killed may still write into the folder


def _kill_processes(marked: bytes) -> None:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != os.getpid() and marked in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
