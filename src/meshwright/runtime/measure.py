"""Measure a rank: its peak memory, and the bytes of its parameters, gradients and optimizer state."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from meshwright.assemble.step import Trainer
from meshwright.facts.forecast import Measurement


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process: on its GPU, or on the host if it runs on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def held_states(trainer: Trainer) -> Measurement:
    """Bytes of parameters, gradients and optimizer state on this rank, counted from their storages.

    fp32 master weights count as optimizer state. Call it between `forward_backward` and `update` to see gradients.
    """
    resident = trainer.engine.resident()
    parameters = storages(resident["parameters"])
    state = [v for values in trainer.optimizer.state.values() for v in values.values() if torch.is_tensor(v)]
    masters = [*resident.get("masters", []), *(trainer.host.tensors() if trainer.host else [])]
    optimizer = storage_bytes([*state, *masters], without=parameters)
    gradients = storage_bytes(resident["gradients"])
    sizes = {"parameters": sum(parameters.values()), "gradients": gradients, "optimizer": optimizer}
    return Measurement(memory=sizes, time={})


def storage_bytes(tensors: Iterable[torch.Tensor], *, without: Iterable[int] = ()) -> int:
    """Bytes of the tensors' storages; views of one storage count once."""
    return sum(size for key, size in storages(tensors).items() if key not in set(without))


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found
