"""A run owns its folder: while one writes to it, another is refused, and told who holds it.

RUN/.lock is locked (`flock`) as long as its holder lives, and names host, process and time. Where a shared folder takes
no locks, or holds them for each host alone, the name decides: on this machine by whether that process lives, on another
by whether the file is still touched. What a crash leaves is taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from meshwright.errors import OutputError, Unreadable
from meshwright.reading import read_json

LOCK = ".lock"
BEAT_S = 5.0
"""How often a holder touches its lock."""
_MISSED_BEATS = 6
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock."""

    host: str
    boot: str
    """Of the machine's last start: pids of an earlier one mean nothing."""
    pid: int
    born: str
    """When the process began, in the kernel's ticks: pids are used again."""
    since: str

    def __str__(self) -> str:
        return f"the run on {self.host}, process {self.pid}, which began at {self.since}"

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether the process is there, for a holder on this host."""
        return self.boot == _boot() and self.born == _born(self.pid) != ""


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold the folder's lock while the block runs; OutputError names who holds it already."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path)
    except OSError as error:
        raise OutputError(f"The output folder {folder} cannot be written: {error.strerror}.") from None
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(path, descriptor, ended), name="lock", daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)
        for made in missing:
            with suppress(OSError):  # it is not empty
                made.rmdir()


def _acquire(path: Path) -> int:
    """The open lock, with our name in it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            locked = _flock(descriptor)
            if not _is_same(descriptor, path):  # its holder has just removed it
                os.close(descriptor)
                continue
            holder = _read(path)
            if locked is False or (holder is not None and _is_alive(holder, path)):
                raise OutputError(
                    f"{path.parent} is being written by {holder or 'another run'}; "
                    "wait for it, end it, or choose another --out."
                )
            if holder is not None:
                print(f"{path.parent}: {holder} is gone and left its lock, which is taken over.", file=sys.stderr)
            _write(descriptor, _own())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _flock(descriptor: int) -> bool | None:
    """Whether we hold it; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_alive(holder: Holder, path: Path) -> bool:
    if holder.is_here:
        return holder.lives
    seen = _touched(path)
    print(f"{path.parent} was last written by {holder}; waiting for a sign of it ...", file=sys.stderr, flush=True)
    deadline = time.monotonic() + _MISSED_BEATS * BEAT_S
    while time.monotonic() < deadline:
        time.sleep(BEAT_S / 5)
        if _touched(path) != seen:
            return True
    return False


def _touched(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _beat(path: Path, descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):
            os.utime(descriptor)


def _read(path: Path) -> Holder | None:
    """Who is named; None where nobody is, or where the file is not as we write it."""
    try:
        return Holder(**read_json(path))
    except (Unreadable, TypeError):
        return None


def _write(descriptor: int, holder: Holder) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(asdict(holder)) + "\n").encode(), 0)
    os.fsync(descriptor)


def _own() -> Holder:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Holder(host=socket.gethostname(), boot=_boot(), pid=os.getpid(), born=_born(os.getpid()), since=since)


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _born(pid: int) -> str:
    """The start of a process; empty where there is none. See man 5 proc_pid_stat, field 22."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = status.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]
