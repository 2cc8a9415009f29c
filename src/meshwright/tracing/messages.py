"""Count the collectives of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.facts.trace import Message
from meshwright.recording.report_as_cpu import tensors_in
from meshwright.torch_private.collectives import COLLECTIVES, group_given_as
from meshwright.torch_private.trees import tree_leaves

_KINDS = (  # by a part of the operator's name; the first match counts
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("send", "send"),
    ("recv", "recv"),
)
_AFTER_BACKWARD = {
    (kind, axis) for kind in ("all_reduce", "reduce_scatter") for axis in ("data", "shard", "replica", "stage")
}
"""Collectives that sum gradients. They count as backward even if they run after it."""
SHARDED = ("data", "shard")


def is_collective(func: Any) -> bool:
    return func.namespace in COLLECTIVES


@dataclass
class Messages:
    """The messages of a step, counted by kind, size, axis and phase."""

    axes: dict[str, str] = field(default_factory=dict)
    """From the name of a process group to its mesh axis."""
    counts: Counter[Message] = field(default_factory=Counter)

    def note(self, func: Any, args: Any, phase: str) -> Iterator[tuple[Tensor, str]]:
        """Count a collective, and yield its tensors with the cause of their memory."""
        kind = next((kind for part, kind in _KINDS if part in func.__name__), None)
        group = _group_of(args)
        if kind is None or group is None or group.size() == 1:
            return
        axis = self.axes.get(group.group_name, "stage")  # other groups are of stages that share a parameter
        if phase == "forward" and (kind, axis) in _AFTER_BACKWARD:
            phase = "backward"
        # The size is that of the output of an all_gather, or of the input of a reduce_scatter: the larger one.
        size = max(sum(tensor.nbytes for tensor in tensors_in(arg)) for arg in args)
        if kind != "recv":
            self.counts[Message(kind=kind, bytes=size, axis=axis, ranks=group.size(), phase=phase)] += 1
        for tensor in tensors_in(args):
            yield tensor, "gathered" if kind == "all_gather" and axis in SHARDED else "communication"


def _group_of(args: Any) -> dist.ProcessGroup | None:
    groups = map(group_given_as, tree_leaves(args))
    return next((group for group in groups if group is not None), None)
