"""What one device, its links and its host can do: the numbers that a forecast divides by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects devices, or a device and its host."""

    kind: str
    """"nvlink", "pcie", "infiniband", "roce", "efa", "ethernet", "shared-memory"."""
    bandwidth: float
    """Bytes a second in one direction: of one device within a node; of one *node* between nodes."""
    latency: float
    """Seconds that a message takes from one neighbour to the next, however small."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of node. Where a number comes from is told in `sources`, by the name of the field."""

    device: str
    memory: int
    """Bytes that a process can have of one device, its own context included."""
    flops: Mapping[str, float]
    """Dense peak of matrix products by compute dtype, in operations a second: `fp32`, `bf16`, `fp16`."""
    bandwidth: float
    """Bytes a second of the device's memory, read and written together."""
    launch: float
    """Seconds that the host needs to launch one kernel in eager PyTorch."""
    within: Link
    """Between devices of one node."""
    between: Link
    """Between nodes."""
    host: Link
    """Between a device and its host's memory."""
    host_memory: int
    """Bytes of memory of one node's host."""
    reach: Mapping[str, float] = field(default_factory=dict)
    """Of the peaks, what kernels of a training step reach where it was measured: `matmul`, `attention`, `stream`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """For each field (`within.bandwidth`, say), the data sheet or measurement that it comes from."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Hardware:
        links = {name: Link(**value[name]) for name in ("within", "between", "host")}
        return cls(**{**value, **links})
