"""Measure what a rank holds and has held."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from meshwright.assemble.step import Trainer
from meshwright.facts.forecast import Measurement


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has had: on its GPU, or of the machine where it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def held_states(trainer: Trainer) -> Measurement:
    """Bytes of parameters, gradients and optimizer state on this rank, counted from their storages.

    fp32 masters beside smaller parameters count with the optimizer. Call it between `forward_backward` and `update`
    to see gradients.
    """
    resident = trainer.engine.resident()
    parameters = storage_bytes(resident["parameters"])
    known = storages(resident["parameters"])
    state = [v for values in trainer.optimizer.state.values() for v in values.values() if torch.is_tensor(v)]
    masters = [*resident.get("masters", []), *(trainer.host.tensors() if trainer.host else [])]
    optimizer = storage_bytes([*state, *masters], without=known)
    gradients = storage_bytes(resident["gradients"])
    return Measurement(memory={"parameters": parameters, "gradients": gradients, "optimizer": optimizer}, time={})


def storage_bytes(tensors: Iterable[torch.Tensor], *, without: Iterable[int] = ()) -> int:
    """Bytes behind tensors; views of one storage count once."""
    found = storages(tensors)
    return sum(size for key, size in found.items() if key not in set(without))


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found
