"""Count the operators and the collectives of a step, by kind, size and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.describe.dtypes import WORDS
from meshwright.describe.flops import ALLOCATIONS, count_flops, operator_kind, product_shape
from meshwright.facts.trace import Message, Operation
from meshwright.recording.report_as_cpu import tensors_in
from meshwright.torch_private.collectives import COLLECTIVES, FUNCTIONAL, group_given_as
from meshwright.torch_private.operators import schema_of
from meshwright.torch_private.trees import tree_leaves
from meshwright.tracing.meter import OperatorRun

_NO_KERNEL = {*ALLOCATIONS, "detach", "alias", "set_"}
_PHASES = ("forward", "backward", "update")
_KINDS = ("reduce_scatter", "all_reduce", "all_gather", "all_to_all", "broadcast", "send", "recv")
"""An operator's name contains one of these, with or without underscores; the first match counts."""
_AFTER_BACKWARD = {
    (kind, axis) for kind in ("all_reduce", "reduce_scatter") for axis in ("data", "shard", "replica", "stage")
}
"""Collectives that sum gradients. They count as backward even if they run after it."""
SHARDED = ("data", "shard")


@dataclass
class Operations:
    """The operators of a step, counted by kind and size."""

    counts: Counter[Operation] = field(default_factory=Counter)
    told: Callable[[Operation], None] = lambda operation: None
    """Called with every kernel, for users that want to know when it runs."""
    seen: Callable[[Any, Any, Any, Any, str], None] = lambda func, args, kwargs, found, phase: None
    """Called with the operator of every kernel, its arguments and result, and the phase."""
    compiled: Callable[[OperatorRun, str], None] = lambda run, phase: None
    """Called with every kernel of compiled code, and the phase."""

    def note(
        self, func: Any, args: Any, kwargs: Any, found: Any, given: list[Tensor], made: list[Tensor], phase: str
    ) -> None:
        """Count an operator. Views, bare allocations and queries (of a device) run no kernel."""
        name = func.overloadpacket.__name__
        runs = schema_of(func).is_mutable or (made and not func.is_view and name not in _NO_KERNEL)
        if phase not in _PHASES or not runs:
            return
        self.seen(func, args, kwargs, found, phase)
        operation = Operation(
            kind=operator_kind(func),
            dtype=_dtype(given or made),
            flops=count_flops(func, args, kwargs, found),
            bytes=float(_moved(func, args, given, made)),
            shape=product_shape(func, args),
            phase=phase,
        )
        self._count(operation)

    def note_fused(self, moved: int, dtype: torch.dtype, phase: str) -> None:
        """Count a kernel that a compiler fused from many operators; `dtype` is that of most bytes it moves."""
        if phase in _PHASES:
            name = WORDS.get(dtype, "fp32")
            operation = Operation(kind="other", dtype=name, flops=0.0, bytes=float(moved), shape=(), phase=phase)
            self._count(operation)

    def _count(self, operation: Operation) -> None:
        self.counts[operation] += 1
        self.told(operation)


def _dtype(tensors: list[Tensor]) -> str:
    """The precision of the largest tensor that has one."""
    known = [tensor for tensor in tensors if tensor.dtype in WORDS]
    return WORDS[max(known, key=lambda tensor: tensor.numel()).dtype] if known else "fp32"


def _moved(func: Any, args: Any, given: list[Tensor], made: list[Tensor]) -> int:
    """Bytes read and written."""
    written = _changed(func, args) if schema_of(func).is_mutable else made
    return sum(map(_size, given)) + sum(map(_size, written))


def _changed(func: Any, args: Any) -> list[Tensor]:
    """The tensors that an operator changes in place. A fused update could scale its gradients, but does not here."""
    named = zip(schema_of(func).arguments, args, strict=False)
    changed = [arg for a, arg in named if a.alias_info is not None and a.alias_info.is_write and a.name != "grads"]
    return tensors_in(changed)


def _size(tensor: Tensor) -> int:
    """Bytes in memory: an expanded dim counts as one element."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.element_size()


def is_collective(func: Any) -> bool:
    return func.namespace in COLLECTIVES


@dataclass
class Messages:
    """The messages of a step, counted by kind, size, axis and phase."""

    axes: dict[str, str] = field(default_factory=dict)
    """From the name of a process group to its mesh axis."""
    counts: Counter[Message] = field(default_factory=Counter)
    told: Callable[[Message], None] = lambda message: None
    """Called with every message, for users that want to know when it is sent."""

    def note(self, func: Any, args: Any, phase: str) -> Iterator[tuple[Tensor, str]]:
        """Count a collective, and yield its tensors with the cause of their memory."""
        name = func.__name__.replace("_", "")
        kind = next((kind for kind in _KINDS if kind.replace("_", "") in name), None)
        group = next((group for group in map(group_given_as, tree_leaves(args)) if group is not None), None)
        if kind is None or group is None or group.size() == 1:
            return
        axis = self.axes.get(group.group_name, "stage")  # other groups are of stages that share a parameter
        if phase == "forward" and (kind, axis) in _AFTER_BACKWARD:
            phase = "backward"
        # The size is that of the output of an all_gather, or of the input of a reduce_scatter: the larger one.
        size = max(sum(tensor.nbytes for tensor in tensors_in(arg)) for arg in args)
        if kind == "all_gather" and func.namespace == FUNCTIONAL:  # which returns its output
            size *= group.size()
        if kind != "recv":
            message = Message(kind=kind, bytes=size, axis=axis, ranks=group.size(), phase=phase)
            self.counts[message] += 1
            self.told(message)
        for tensor in tensors_in(args):
            yield tensor, "gathered" if kind == "all_gather" and axis in SHARDED else "communication"
