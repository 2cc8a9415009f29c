"""Count the operators of a step by kind, size and cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.describe.dtypes import WORDS
from meshwright.describe.flops import ALLOCATIONS, count_flops, operator_kind, product_shape
from meshwright.facts.trace import Operation
from meshwright.recording.report_as_cpu import tensors_in
from meshwright.torch_private.operators import schema_of

_NO_KERNEL = {*ALLOCATIONS, "detach", "alias", "set_"}
_PHASES = ("forward", "backward", "update")


@dataclass
class Operations:
    """The operators of a step, counted by kind and size."""

    counts: Counter[Operation] = field(default_factory=Counter)

    def note(
        self, func: Any, args: Any, kwargs: Any, found: Any, given: list[Tensor], made: list[Tensor], phase: str
    ) -> None:
        """Count an operator. Views, bare allocations and queries (of a device) run no kernel."""
        name = func.overloadpacket.__name__
        runs = schema_of(func).is_mutable or (made and not func.is_view and name not in _NO_KERNEL)
        if phase not in _PHASES or not runs:
            return
        operation = Operation(
            kind=operator_kind(func),
            dtype=_dtype(given or made),
            flops=count_flops(func, args, kwargs, found),
            bytes=float(_moved(func, args, given, made)),
            shape=product_shape(func, args),
            phase=phase,
        )
        self.counts[operation] += 1

    def note_fused(self, moved: int, dtype: torch.dtype, phase: str) -> None:
        """Count a kernel that a compiler fused from many operators; `dtype` is that of most bytes it moves."""
        if phase in _PHASES:
            name = WORDS.get(dtype, "fp32")
            operation = Operation(kind="other", dtype=name, flops=0.0, bytes=float(moved), shape=(), phase=phase)
            self.counts[operation] += 1


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
