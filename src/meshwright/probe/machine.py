"""This machine as a cluster, from what torch and the system report, without measurements: the cluster `local`."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from meshwright.facts.catalogue import hardware_of_device, name_of_gpu
from meshwright.facts.cluster import Cluster
from meshwright.runtime.memory_limit import host_memory
from meshwright.runtime.place import choose_device
from meshwright.units import GIB


def local_cluster(device: str | None = None, *, devices: int | None = None) -> Cluster:
    """This machine as a cluster: its GPUs under the catalogue's name, or each core as one CPU device.

    `devices` is the number of equal parts of the CPU instead, or of the GPUs to use.
    """
    if choose_device(device) == "cuda":
        return _gpus(devices or torch.cuda.device_count())
    count = devices or len(os.sched_getaffinity(0))
    memory = host_memory()
    hardware = {"memory": memory // count, "host_memory": memory, "sources": _said("memory", "host_memory")}
    return Cluster(devices_per_node=count, device="cpu", memory_gib=memory / count / GIB, hardware=hardware)


def machine_words(device: torch.device) -> str:
    """Name of the measured device, such as `2 cores, aarch64` or `NVIDIA H200`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"


def torch_release() -> str:
    """PyTorch's version without the build, such as 2.13.0."""
    return str(torch.__version__).split("+")[0]


def _gpus(count: int) -> Cluster:
    properties = torch.cuda.get_device_properties(0)
    known = name_of_gpu(properties.name, properties.total_memory)
    said: dict[str, Any] = {"memory": properties.total_memory, "host_memory": host_memory()}
    if known is None:
        # The catalogue does not know it, so the cluster file must hold everything.
        assumed = hardware_of_device(None).to_json()
        said = {**assumed, **said, "sources": {**assumed["sources"], **_said(*said)}}
        del said["device"]
    else:
        said["sources"] = _said(*said)
    gib, name = properties.total_memory / GIB, "-".join(word for word in properties.name.split() if word != "NVIDIA")
    return Cluster(devices_per_node=count, device=known or name, memory_gib=gib, hardware=said)


def _said(*fields: str) -> dict[str, str]:
    return dict.fromkeys(fields, f"torch {torch.__version__} and the system of this machine")
