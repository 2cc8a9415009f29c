"""How much memory this process may use, what sets that limit, and how much of it is used."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

GPU = "GPU"
_CONTAINER, _STATUS = Path("/sys/fs/cgroup/memory.max"), Path("/proc/self/status")
_ULIMITS = {"ulimit -v": (resource.RLIMIT_AS, "VmSize"), "ulimit -d": (resource.RLIMIT_DATA, "VmData")}


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """A limit on this process's memory, and what counts towards it."""

    name: str
    limit: int
    counted: str
    """A field of /proc/self/status, or `GPU`."""


def find_limit(device: torch.device, usage: Mapping[str, int], *, local_ranks: int) -> MemoryLimit:
    """The limit that leaves the least. The ranks of a machine share its memory; a GPU is one rank's alone."""
    if device.type == "cuda":
        return MemoryLimit(name="the GPU", limit=torch.cuda.mem_get_info(device)[1], counted=GPU)
    share = MemoryLimit(name="the host, shared by its ranks", limit=host_memory() // local_ranks, counted="VmRSS")
    return min([share, *_ulimits()], key=lambda one: one.limit - usage[one.counted])


def memory_usage(device: torch.device) -> dict[str, int]:
    """Bytes in use now, by each measure that a limit may count."""
    usage = {field: process_bytes(field) or 0 for field in ("VmRSS", "VmSize", "VmData")}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usage[GPU] = total - free
    return usage


def host_memory() -> int:
    """Bytes of memory of the machine, or of the container if that has less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CONTAINER.read_text().strip() if _CONTAINER.exists() else "max"
    return min(memory, int(limit)) if limit.isdigit() else memory


def _ulimits() -> Iterator[MemoryLimit]:
    for name, (number, field) in _ULIMITS.items():
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            yield MemoryLimit(name=name, limit=soft, counted=field)


def process_bytes(field: str) -> int | None:
    """A size of this process in bytes, from /proc."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None
