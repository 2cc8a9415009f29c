"""Trace of one rank's step on fake tensors: its memory, kernels and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One kernel, or several identical ones."""

    kind: str
    """What limits its speed: "matmul", "attention", "convolution", "recurrent" or "other"."""
    dtype: str
    """The dtype of its inputs: `fp32`, `bf16`, `fp16`."""
    flops: float
    bytes: float
    """Bytes read and written in the device's memory."""
    shape: tuple[int, ...] = ()
    """Of a matmul: (batch, m, n, k); otherwise empty."""
    phase: str = "forward"
    """"forward", "backward" (including recomputation) or "update"."""
    count: int = 1
    """Number of identical kernels."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective, or a send to another stage."""

    kind: str
    """"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "send"; of `dp` also "reduce",
    "gather" and "scatter", to and from its first device."""
    bytes: float
    """Bytes of the whole tensor: what all ranks hold together after an all_gather or before a reduce_scatter."""
    axis: str
    """The mesh axis of its group: "data", "shard", "replica", "tensor" or "stage"."""
    ranks: int
    phase: str = "forward"
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One rank's step."""

    rank: int
    ranks: int
    memory: Mapping[str, int]
    """Bytes at the peak, by a cause from MEMORY_CAUSES, without the allocator's fragmentation."""
    reserved: int
    """Bytes that the caching allocator would reserve for the same sequence of requests."""
    returns: int = 0
    """How often the allocator returns memory to a device of a given capacity in the step, which takes time."""
    operations: tuple[Operation, ...] = ()
    messages: tuple[Message, ...] = ()
    unseen: str = ""
    """What the trace could not observe; empty if nothing."""
    stages: tuple[int, ...] = field(default=())
    """The pipeline stages that the rank holds; empty without a pipeline."""

    @property
    def peak(self) -> int:
        """Bytes allocated at the peak."""
        return sum(self.memory.values())
