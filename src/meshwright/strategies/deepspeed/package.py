"""The DeepSpeed package itself: found, imported quietly, and joined to the ranks that are there already."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from typing import Any

import torch

from meshwright.environment import announce_local_rank, choose_deepspeed_device

INSTALL = "pip install 'meshwright[deepspeed]'"


def is_installed() -> bool:
    spec = importlib.util.find_spec("deepspeed")
    return spec is not None and spec.origin is not None  # a mere folder of that name has none


def refuse_nvme(folder: str, device: str) -> str | None:
    """Why optimizer and parameters cannot lie in files of this folder."""
    builder = imported(device).ops.op_builder.AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        return (
            f"offload=nvme:{folder} reads and writes with libaio, whose headers DeepSpeed does not find here; install "
            "them (libaio-dev), or use offload=params."
        )
    return None


def imported(device: str) -> Any:
    """The package for a kind of device."""
    choose_deepspeed_device(device)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it announces each of its optional parts that it does not find
    try:
        deepspeed = importlib.import_module("deepspeed")
    finally:
        logging.disable(before)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def joined_to_ranks(device: torch.device) -> Any:
    """The package, ready to make engines on this device among the ranks of `torch.distributed`."""
    deepspeed = imported(device.type)
    announce_local_rank(device.index or 0)
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)
    # Else ranks on CPUs compile an extension for sums in shared memory: a minute, and a compiler that may not be there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False)
    # An engine with a pipeline leaves its ranks behind for those after it.
    deepspeed.utils.groups.mpu = None
    return deepspeed
