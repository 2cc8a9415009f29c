"""Speeds and sizes of a device, its links and its host, from which forecasts are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between devices, or between a device and its host."""

    kind: str
    """"nvlink", "pcie", "infiniband", "roce", "efa", "ethernet", "shared-memory"."""
    bandwidth: float
    """Bytes per second in one direction: per device within a node, per *node* between nodes."""
    latency: float
    """Seconds that the smallest message takes between neighbours."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Numbers of one kind of node. `sources` cites where each comes from."""

    device: str
    memory: int
    """Bytes of one device that a process can use, including its context."""
    flops: Mapping[str, float]
    """Dense peak FLOP/s of matmuls by compute dtype: `fp32`, `bf16`, `fp16`."""
    bandwidth: float
    """Bytes per second of the device's memory, reads and writes together."""
    launch: float
    """Seconds that the host needs to launch one kernel in eager PyTorch."""
    within: Link
    """Between devices of one node."""
    between: Link
    """Between nodes."""
    host: Link
    """Between a device and its host's memory."""
    host_memory: int
    """Bytes of host memory per node."""
    reach: Mapping[str, float] = field(default_factory=dict)
    """Measured shares of the peaks that kernels of a training step reach: `matmul`, `attention`, `stream`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The data sheet or measurement behind each field, such as `within.bandwidth`."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Hardware:
        links = {name: Link(**value[name]) for name in ("within", "between", "host")}
        return cls(**{**value, **links})
