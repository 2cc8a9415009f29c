"""The only file that reads or sets environment variables. Imports no torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = "MESHWRIGHT_FOLDER"  # for ranks that Meshwright starts: the folder of request, result and failures

ATTEMPT = "MESHWRIGHT_ATTEMPT"  # for ranks that Meshwright starts: how often the run's ranks were started before

CACHE = "MESHWRIGHT_CACHE"  # folder for what `plan` and `rehearse` keep

PROGRAMS = "MESHWRIGHT_PROGRAMS"  # "0": blocks of the tensor axis run as they are, without recorded programs

LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """The rank that torchrun, Slurm or Kubernetes assigned to this process."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    meeting_point: tuple[str, int] | None = None
    """Address and port, if the launcher does not set torch's variables."""


def launched(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """The rank that a launcher assigned to this process; None if Meshwright must start the ranks itself."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return LaunchedRank(
            rank=int(environment["RANK"]),
            ranks=int(environment["WORLD_SIZE"]),
            # Kubernetes' PyTorchJob sets no local rank: it runs one process per pod.
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_ranks=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        )
    if {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST"} <= environment.keys():
        return _from_slurm(environment)
    return None


def announce(place: LaunchedRank) -> None:
    """Set torch.distributed's rendezvous variables if the launcher did not."""
    if place.meeting_point is not None:
        os.environ.setdefault("MASTER_ADDR", place.meeting_point[0])
        os.environ.setdefault("MASTER_PORT", str(place.meeting_point[1]))


@contextmanager
def alone() -> Iterator[None]:
    """Hide the launcher's ranks from code that would divide its data by them: it runs as the only rank."""
    hidden = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def own_folder() -> Path | None:
    """The folder of the request and result of a rank that Meshwright started."""
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else None


def own_rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def programs_wanted() -> bool:
    return os.environ.get(PROGRAMS, "1") != "0"


def restart_count() -> int:
    """Number of times that the launcher, ours or torchrun, has restarted the ranks; the same on all nodes."""
    return int(os.environ.get(ATTEMPT, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def announce_attempt(number: int) -> None:
    """Set the `restart_count` of ranks that are started from now on."""
    os.environ[ATTEMPT] = str(number)


def use_interface(interface: str) -> None:
    """Let gloo and NCCL communicate through an interface."""
    os.environ |= _on_interface(interface)


def interface_is_set() -> bool:
    """Whether the user has chosen the interface of gloo or NCCL."""
    return bool({"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & os.environ.keys())


def meeting_address() -> str | None:
    """The address where launched ranks meet."""
    return os.environ.get("MASTER_ADDR")


def environment_for_ranks(
    ranks: int, folder: str, *, ending: Iterable[str], interface: str = LOOPBACK
) -> AbstractContextManager[None]:
    """Set variables for the ranks that are started in this block: their folder, and an equal share of CPU threads.

    `ending` names the signals on which torch's agent ends the ranks. Ranks communicate through `interface`: other
    machines need not reach ranks that are all on this one.
    """
    values = {
        FOLDER: folder,
        ATTEMPT: "0",
        **{name: os.environ.get(name, value) for name, value in _on_interface(interface).items()},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks))),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(ending),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # our own store for ranks listens on one address only
    }
    return _temporarily(values)


def silent_profiler() -> AbstractContextManager[None]:
    """For starting processes that profile: keeps torch 2.13 from printing to stderr."""
    return _temporarily({"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")})


def environment_without_ranks() -> dict[str, str]:
    """The environment for a process without ranks: without the variables of torchrun, Slurm and Meshwright."""
    ours = (FOLDER, ATTEMPT, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    theirs = ("GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_")
    return {key: value for key, value in os.environ.items() if key not in ours and not key.startswith(theirs)}


def environment_offline() -> dict[str, str]:
    """The environment for a process in which transformers must not contact its hub."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def choose_deepspeed_device(kind: str) -> None:
    """Set the kind of device that DeepSpeed reads when it is imported."""
    os.environ.setdefault("DS_ACCELERATOR", kind)


def announce_local_rank(index: int) -> None:
    """Set the device index that every DeepSpeed engine reads."""
    os.environ.setdefault("LOCAL_RANK", str(index))


def cache_folder() -> Path:
    """Where files are kept that can be made again: $MESHWRIGHT_CACHE, or a folder in the user's cache."""
    own = os.environ.get(CACHE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def wandb_project(default: str) -> str:
    return os.environ.get("WANDB_PROJECT", default)


def mlflow_uri(default: str) -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", default)


@contextmanager
def _temporarily(values: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)


def _on_interface(interface: str) -> dict[str, str]:
    # NCCL would take every interface whose name begins like this one.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


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
    """The first host in Slurm's short form: `node03-ib` for `node[03-07,12]-ib,other`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else nodes)
