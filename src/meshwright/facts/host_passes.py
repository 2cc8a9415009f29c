"""Host seconds of a model's own pass: its Python and autograd, without the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostPasses:
    """Seconds of the host for one micro-batch, on the machine that timed them."""

    units: Mapping[str, tuple[float, float]]
    """Forward and backward of each unit of the model, by the name of its call; the loss is `loss`."""
    reference: float
    """Seconds of the reference pass on the same machine, which tells how fast its host is."""

    def at(self, reference: float) -> HostPasses:
        """The same on a host whose reference pass takes `reference` seconds."""
        times = reference / self.reference
        units = {name: (forward * times, backward * times) for name, (forward, backward) in self.units.items()}
        return HostPasses(units=units, reference=reference)
