"""The operators of a step, each with what it costs, counted where several are alike."""

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
from meshwright.torch_private.operators import schema_of
from meshwright.torch_private.trees import tree_leaves

_NO_KERNEL = {*ALLOCATIONS, "detach", "alias", "set_"}
_PHASES = ("forward", "backward", "update")


@dataclass
class Operations:
    """What was computed, by kind and size."""

    counts: Counter[Operation] = field(default_factory=Counter)

    def note(
        self, func: Any, args: Any, kwargs: Any, found: Any, given: list[Tensor], made: list[Tensor], phase: str
    ) -> None:
        """Count an operator. Views, bare allocations and questions (where a tensor lies) run no kernel."""
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
        """Count a kernel that a compiler made of many operators; `dtype` is that of most of what it moves."""
        if phase in _PHASES:
            name = WORDS.get(dtype, "fp32")
            operation = Operation(kind="other", dtype=name, flops=0.0, bytes=float(moved), shape=(), phase=phase)
            self.counts[operation] += 1


def _dtype(tensors: list[Tensor]) -> str:
    """That of the largest tensor of a precision."""
    known = [tensor for tensor in tensors if tensor.dtype in WORDS]
    return WORDS[max(known, key=lambda tensor: tensor.numel()).dtype] if known else "fp32"


def _moved(func: Any, args: Any, given: list[Tensor], made: list[Tensor]) -> int:
    """Bytes read and written."""
    written = _changed(func, args) if schema_of(func).is_mutable else made
    return sum(map(_size, given)) + sum(map(_size, written))


def _changed(func: Any, args: Any) -> list[Tensor]:
    """What an operator changes in place. A fused update may scale its gradients, but is not asked to here."""
    named = zip(schema_of(func).arguments, args, strict=False)
    changed = [arg for a, arg in named if a.alias_info is not None and a.alias_info.is_write and a.name != "grads"]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """Of what lies in memory: an expanded dim is one element."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.element_size()
