"""Clean up after a killed launcher: a small process that outlives it and kills what it started.

    python janitor.py FOLDER VARIABLE

The launcher holds the other end of the janitor's stdin. If that closes while FOLDER exists, the launcher was killed.
The janitor then kills every process with VARIABLE=FOLDER in its environment (ranks and what they started), and removes
FOLDER. It imports only the standard library and runs without `site`, so it starts in milliseconds.
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
    """Run a janitor with this environment during the block. The block must remove the folder at its end."""
    command = [sys.executable, "-I", "-S", __file__, str(folder), variable]
    janitor = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,  # a signal to the launcher's process group must not end the janitor
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
