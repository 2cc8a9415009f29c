"""Measure a rank: peak memory, of the process or of its steps, and bytes of parameters, gradients and optimizer."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from meshwright.assemble.step import Trainer
from meshwright.facts.forecast import Measurement
from meshwright.runtime.memory_limit import process_bytes

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # Linux: forget the largest resident size so far (man 5 proc)
REST = "rest"
"""The part of the peak beside states: activations, communication buffers, and memory that the allocator caches."""


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


class PeakMeter:
    """Peak since its creation. Create it before the model: on a CPU it subtracts what Python and torch take by then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.process = 0
        else:
            _forget_peak()
            self.process = process_bytes("VmRSS") or 0

    def peak(self) -> int:
        """Peak bytes, without those of the process before."""
        if self._device.type == "cuda":
            return peak_bytes(self._device)
        # Not getrusage: it includes the launcher's size, which a rank inherits when it is forked.
        largest = process_bytes("VmHWM")
        return max(0, (peak_bytes(self._device) if largest is None else largest) - self.process)

    def by_cause(self, states: Measurement) -> dict[str, int]:
        """The peak, divided into states and the rest."""
        return {**states.memory, REST: max(0, self.peak() - states.peak)}


def _forget_peak() -> None:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:  # no such file or no permission: the peak then covers the whole process
        return
