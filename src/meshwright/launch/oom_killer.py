"""How many processes the kernel has killed for lack of memory, so that such a SIGKILL is told apart from others."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),  # of this container, cgroup version 2
    Path("/sys/fs/cgroup/memory/memory.oom_control"),  # the same, version 1
    Path("/proc/vmstat"),  # of the whole machine
)


def count_oom_kills(counters: tuple[Path, ...] = _COUNTERS) -> int:
    """The kernel's count so far, which only grows; 0 if it cannot be read. The machine's includes the container's."""
    return max((_read(path) for path in counters), default=0)


def _read(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(found[0]) if found and found[0].isdigit() else 0
