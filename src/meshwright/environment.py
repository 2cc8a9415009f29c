"""The only file that reads or sets environment variables.

Most of them say who started this process and which rank it is. Imports no torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = "MESHWRIGHT_FOLDER"  # set for the ranks that Meshwright starts: where request, result and failures lie

LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """A place among ranks that torchrun, Slurm or Kubernetes has given to this process."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    meeting_point: tuple[str, int] | None = None
    """Address and port, where the launcher does not set torch's own variables."""


def launched(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """The place that a launcher gave to this process, or None: then Meshwright starts the ranks itself."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return LaunchedRank(
            rank=int(environment["RANK"]),
            ranks=int(environment["WORLD_SIZE"]),
            # Kubernetes' PyTorchJob sets no local rank: it runs one process a pod.
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_ranks=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        )
    if {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST"} <= environment.keys():
        return _from_slurm(environment)
    return None


def announce(place: LaunchedRank) -> None:
    """Tell torch.distributed where to meet, where the launcher did not speak its language."""
    if place.meeting_point is not None:
        os.environ.setdefault("MASTER_ADDR", place.meeting_point[0])
        os.environ.setdefault("MASTER_PORT", str(place.meeting_point[1]))


def own_folder() -> Path | None:
    """Where a rank that Meshwright started finds its request and leaves its words."""
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else None


def own_rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def restart_count() -> int:
    """How many times the launcher, ours or torchrun, has started this rank anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def environment_for_ranks(ranks: int, folder: str, *, ending: Iterable[str]) -> AbstractContextManager[None]:
    """What the launcher hands on to the ranks: their folder, and an equal share of the CPU's threads.

    `ending` are the signals that torch's agent answers by ending the ranks.
    """
    values = {
        FOLDER: folder,
        # All ranks are on this machine, so nobody else needs to reach them.
        **{name: os.environ.get(name, LOOPBACK) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_threads(ranks))),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(ending),
    }
    return _set_meanwhile(values)


def silent_profiler() -> AbstractContextManager[None]:
    """For starting processes that profile: torch 2.13 would print to stderr when profiling begins and ends."""
    return _set_meanwhile({"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")})


def environment_without_ranks() -> dict[str, str]:
    """For a process that is to know of no ranks: without what torchrun, Slurm or Meshwright told this one."""
    ours = (FOLDER, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    theirs = ("GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_")
    return {key: value for key, value in os.environ.items() if key not in ours and not key.startswith(theirs)}


def environment_offline() -> dict[str, str]:
    """For a process in which transformers must not contact its hub."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def choose_deepspeed_device(kind: str) -> None:
    """DeepSpeed reads the kind of device from the environment when it is imported."""
    os.environ.setdefault("DS_ACCELERATOR", kind)


def announce_local_rank(index: int) -> None:
    """Every DeepSpeed engine reads the index of its device from the environment."""
    os.environ.setdefault("LOCAL_RANK", str(index))


def wandb_project(default: str) -> str:
    return os.environ.get("WANDB_PROJECT", default)


def mlflow_uri(default: str) -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", default)


@contextmanager
def _set_meanwhile(values: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)


def _threads(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _from_slurm(environment: Mapping[str, str]) -> LaunchedRank:
    per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", environment["SLURM_NTASKS"]))
    address = environment.get("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    port = int(environment.get("MASTER_PORT", 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 10000))
    return LaunchedRank(
        rank=int(environment["SLURM_PROCID"]),
        ranks=int(environment["SLURM_NTASKS"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        local_ranks=int(per_node.group()) if per_node else 1,
        meeting_point=(address, port),
    )


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form: of `node[03-07,12]-ib,other` it is `node03-ib`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else nodes)
