"""How much memory a rank's steps take, apart from what its process takes anyway."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.facts.forecast import Measurement
from meshwright.runtime.measure import peak_bytes

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # Linux: forget the largest resident size so far (man 5 proc)
REST = "rest"
"""What a peak holds beside states: activations, buffers of communication, and what an allocator keeps."""


class PeakMeter:
    """Made before a model is built; on a CPU, Python and torch are then loaded and counted as the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.process = 0
        else:
            _forget_peak()
            self.process = _resident("VmRSS") or 0

    def peak(self) -> int:
        """Bytes since, without the process's own."""
        if self._device.type == "cuda":
            return peak_bytes(self._device)
        # Not getrusage: what that tells includes the launcher's size, which a rank inherits when it is started.
        largest = _resident("VmHWM")
        return max(0, (peak_bytes(self._device) if largest is None else largest) - self.process)

    def by_cause(self, states: Measurement) -> dict[str, int]:
        """The peak with its states told apart."""
        rest = max(0, self.peak() - states.peak)
        return {**states.memory, REST: rest}


def _forget_peak() -> None:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:  # no such file, or not for us: then the peak is that of the whole process
        return


def _resident(field: str) -> int | None:
    """A size from the kernel's account of this process, in bytes."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None
