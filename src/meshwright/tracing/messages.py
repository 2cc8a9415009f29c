"""The collectives of a step, as the process groups are asked for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.facts.trace import Message
from meshwright.torch_private.collectives import COLLECTIVES, group_given_as
from meshwright.torch_private.trees import tree_leaves

_KINDS = (  # by a part of the operator's name; the first that fits
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
"""What sums gradients, also where that is done once backward is through."""
SHARDED = ("data", "shard")


def is_collective(func: Any) -> bool:
    return func.namespace in COLLECTIVES


@dataclass
class Messages:
    """What was sent, counted by kind, size, axis and phase."""

    axes: dict[str, str] = field(default_factory=dict)
    """From the name of a process group to the mesh axis that it lies on."""
    counts: Counter[Message] = field(default_factory=Counter)

    def note(self, func: Any, args: Any, phase: str) -> Iterator[tuple[Tensor, str]]:
        """Count a collective; gives its tensors, each with the cause of its memory."""
        kind = next((kind for part, kind in _KINDS if part in func.__name__), None)
        group = _group_of(args)
        if kind is None or group is None or group.size() == 1:
            return
        axis = self.axes.get(group.group_name, "stage")  # else it is of the stages that share a parameter
        if phase == "forward" and (kind, axis) in _AFTER_BACKWARD:
            phase = "backward"
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        # Of an all_gather the output is the whole, of a reduce_scatter the input: whichever is larger.
        size = max(sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args)
        if kind != "recv":
            self.counts[Message(kind=kind, bytes=size, axis=axis, ranks=group.size(), phase=phase)] += 1
        for tensor in tensors:
            yield tensor, "gathered" if kind == "all_gather" and axis in SHARDED else "communication"


def _group_of(args: Any) -> dist.ProcessGroup | None:
    groups = map(group_given_as, tree_leaves(args))
    return next((group for group in groups if group is not None), None)
