"""What one rank did in one step on fake tensors: what it allocated, computed and sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One kernel, or several alike."""

    kind: str
    """"matmul", "attention", "convolution" or "other": which ceiling its speed has."""
    dtype: str
    """Of what it computes on: `fp32`, `bf16`, `fp16`."""
    flops: float
    bytes: float
    """Read and written in the device's memory."""
    shape: tuple[int, ...] = ()
    """Of a matmul: (batch, m, n, k). Empty for others."""
    phase: str = "forward"
    """"forward", "backward" (recomputing included) or "update"."""
    count: int = 1
    """How many kernels of this very size."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective, or a send to another stage."""

    kind: str
    """"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "send"."""
    bytes: float
    """Of the whole tensor: what all ranks of the group hold together after an all_gather or before a reduce_scatter."""
    axis: str
    """The mesh axis that its group lies on: "data", "shard", "replica", "tensor" or "stage"."""
    ranks: int
    phase: str = "forward"
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One rank's step."""

    rank: int
    ranks: int
    memory: Mapping[str, int]
    """Bytes by cause at the moment of the peak, without the allocator's own. The causes of MEMORY_CAUSES."""
    reserved: int
    """Bytes that the caching allocator would hold for the same sequence of requests."""
    operations: tuple[Operation, ...] = ()
    messages: tuple[Message, ...] = ()
    unseen: str = ""
    """What the trace could not see; empty if nothing."""
    stages: tuple[int, ...] = field(default=())
    """The pipeline stages that the rank holds; empty without a pipeline."""

    @property
    def peak(self) -> int:
        """Bytes allocated at the peak."""
        return sum(self.memory.values())
