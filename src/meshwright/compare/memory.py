"""Measure the memory that a rank's steps take, without that of Python and torch."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.facts.forecast import Measurement
from meshwright.runtime.measure import peak_bytes

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # Linux: forget the largest resident size so far (man 5 proc)
REST = "rest"
"""The part of the peak beside states: activations, communication buffers, and memory that the allocator caches."""


class PeakMeter:
    """Peak since its creation. Create it before the model: on a CPU it subtracts what Python and torch take by then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.process = 0
        else:
            _forget_peak()
            self.process = _resident("VmRSS") or 0

    def peak(self) -> int:
        """Peak bytes, without those of the process before."""
        if self._device.type == "cuda":
            return peak_bytes(self._device)
        # Not getrusage: it includes the launcher's size, which a rank inherits when it is forked.
        largest = _resident("VmHWM")
        return max(0, (peak_bytes(self._device) if largest is None else largest) - self.process)

    def by_cause(self, states: Measurement) -> dict[str, int]:
        """The peak, divided into states and the rest."""
        return {**states.memory, REST: max(0, self.peak() - states.peak)}


def _forget_peak() -> None:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:  # no such file or no permission: the peak then covers the whole process
        return


def _resident(field: str) -> int | None:
    """A size of this process in bytes, from /proc."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None
