"""What a rank of the context axis holds, computes and sends, for the planner."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.facts.costs import Kernel, UnitCosts
from meshwright.facts.precision import FORMATS
from meshwright.strategies.model_axis import Division, Sent, UnitShare

COUNT_BYTES = 4.0
"""Bytes of a loss in fp32 that is summed over ranks. A message of this size takes its latency."""


class ContextDivision(Division):
    """Every unit has its share of the tokens; attention gathers keys and values, and its backward sums their gradients.

    Stages send whole activations to each other, so boundaries are not divided.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        gathered = [size for size in _gathered_bytes(unit.forward, samples) if size > 0]
        others = 1 - 1 / self._ranks
        is_loss = not unit.parameters and not unit.is_block
        return UnitShare(
            parts=self._ranks,
            regathered=sum(gathered) * others,
            passing=sum(gathered) * others,
            forward=(
                *(Sent(kind="all_gather", bytes=size) for size in gathered),
                *((Sent(kind="all_reduce", bytes=COUNT_BYTES),) if is_loss else ()),
            ),
            backward=(
                *self._gathered_again(unit, gathered),
                *(Sent(kind="reduce_scatter", bytes=size) for size in gathered),
            ),
            intercepted=True,
        )

    def _gathered_again(self, unit: UnitCosts, gathered: list[float]) -> Iterator[Sent]:
        """A block that recomputes its attention gathers for it again."""
        if any(kernel in unit.forward for kernel in unit.backward if _attends(kernel)):
            yield from (Sent(kind="all_gather", bytes=size) for size in gathered)


def _attends(kernel: Kernel) -> bool:
    return kernel.kind == "attention" or "softmax" in kernel.name


def _gathered_bytes(kernels: tuple[Kernel, ...], samples: int) -> Iterator[float]:
    """The bytes of the keys and of the values of each attention."""
    for kernel in kernels:
        if kernel.kind == "attention":
            yield from [_keys_and_values(kernel, samples) / 2] * 2
    for before, kernel in pairwise(kernel for kernel in kernels if kernel.kind == "matmul" or "softmax" in kernel.name):
        if "softmax" in kernel.name and before.kind == "matmul":
            yield _right_side(before, samples)  # the keys
        elif "softmax" in before.name and kernel.kind == "matmul":
            yield _right_side(kernel, samples)  # the values


def _keys_and_values(kernel: Kernel, samples: int) -> float:
    """What attention reads beside its queries. Keys and values may have fewer heads than queries."""
    if not kernel.shape:
        return 2 * kernel.made.at(samples)
    heads, queries, _, width = (size.at(samples) for size in kernel.shape)
    own = heads * queries * width * FORMATS[kernel.dtype].bytes
    return max(0.0, kernel.bytes.at(samples) - own - kernel.made.at(samples))


def _right_side(kernel: Kernel, samples: int) -> float:
    """Bytes of the second factor of a product of (batch, m, k) and (batch, k, n)."""
    if not kernel.shape:
        return 0.0
    batch, _, columns, inner = (size.at(samples) for size in kernel.shape)
    return batch * columns * inner * FORMATS[kernel.dtype].bytes
