"""Lock a run's folder: while one run writes to it, another is refused with the name of the holder.

RUN/.lock is locked (`flock`) while its holder lives, and holds host, process and time. A shared file system may have no
locks, or locks that other hosts do not see. Then the content decides: a holder on this machine is alive if its process
is, a holder on another machine if it still touches the file. A lock left by a crash is taken over.
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
    """Boot id of the machine: a pid from before a reboot means nothing."""
    pid: int
    born: str
    """Start time of the process in kernel ticks: pids are reused."""
    since: str

    def __str__(self) -> str:
        return f"the run on {self.host}, process {self.pid}, which began at {self.since}"

    @property
    def lives(self) -> bool:
        """Whether the process runs; only for a holder on this host."""
        return self.boot == _boot() and self.born == _born(self.pid) != ""


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold the folder's lock while the block runs; OutputError if another run holds it."""
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
    """Open the lock and write our name into it; returns its file descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            locked = _flock(descriptor)
            if not _is_same(descriptor, path):  # its holder just removed it
                os.close(descriptor)
                continue
            holder = _read(path)
            if locked is False or (holder is not None and _is_alive(holder, path)):
                raise OutputError(
                    f"{path.parent} is being written by {holder or 'another run'}; "
                    "wait for it, end it, or choose another --out."
                )
            if holder is not None:
                print(f"{path.parent}: {holder} is gone; taking over its lock.", file=sys.stderr)
            _write(descriptor, _own())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _flock(descriptor: int) -> bool | None:
    """Whether we hold the lock; None if the file system has no locks."""
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
    if holder.host == socket.gethostname():
        return holder.lives
    seen = _touched(path)
    print(
        f"{path.parent} was last written by {holder}; checking whether it still runs ...", file=sys.stderr, flush=True
    )
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
    """The holder in the file; None if the file is empty or not one of ours."""
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
    """Start time of a process; empty if it does not run. See man 5 proc_pid_stat, field 22."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = status.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]
