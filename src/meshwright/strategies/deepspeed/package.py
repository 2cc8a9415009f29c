"""Find the DeepSpeed package, import it quietly, and connect it to the existing ranks."""

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
    return spec is not None and spec.origin is not None  # a plain folder of that name has no origin


def refuse_nvme(folder: str, device: str) -> str | None:
    """Why optimizer and parameters cannot be kept in files of this folder; None if they can."""
    builder = imported(device).ops.op_builder.AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        return (
            f"offload=nvme:{folder} needs libaio, but DeepSpeed does not find its headers on this machine; install "
            "them (libaio-dev), or use offload=params."
        )
    return None


def imported(device: str) -> Any:
    """Import the package for a device type."""
    choose_deepspeed_device(device)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns about each optional part that is missing
    try:
        deepspeed = importlib.import_module("deepspeed")
    finally:
        logging.disable(before)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def joined_to_ranks(device: torch.device) -> Any:
    """Import the package and connect it to the ranks of `torch.distributed`."""
    deepspeed = imported(device.type)
    announce_local_rank(device.index or 0)
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)
    # Otherwise CPU ranks compile an extension for shared-memory sums, which takes a minute and needs a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False)
    # A pipeline engine leaves its topology behind for later engines.
    deepspeed.utils.groups.mpu = None
    return deepspeed
