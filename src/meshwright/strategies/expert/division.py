"""What a rank of `ep=N` holds, computes and sends, from a model's facts alone."""

from __future__ import annotations

from dataclasses import replace

from meshwright.facts.costs import Kernel, Size, UnitCosts
from meshwright.facts.model import ExpertFacts, ModelFacts
from meshwright.facts.precision import FORMATS
from meshwright.strategies.model_axis import Division, Sent, Surplus, UnitShare

INDEX_BYTES = 8
"""Of one count of rows."""
WIDE_BYTES = 4
"""Of a routing weight: routers compute in fp32."""


class ExpertDivision(Division):
    """Experts are divided, and with balanced routing a rank computes as many rows as it has itself.

    At worst, all tokens of all ranks choose experts of one rank, as far as it has enough different ones.
    """

    def __init__(self, facts: ModelFacts, ranks: int, *, worst: bool = False) -> None:
        self._facts, self._ranks, self._mixtures, self._worst = facts, ranks, facts.experts, worst
        self._names = {name for one in facts.experts for name in one.parameters}

    def at_worst(self) -> Division:
        return ExpertDivision(self._facts, self._ranks, worst=True)

    def parts_of(self, names: tuple[str, ...]) -> int:
        return self._ranks if names[0] in self._names else 1

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        own = set(unit.parameters)
        mixtures = [one for one in self._mixtures if own.intersection(one.parameters)]
        if not mixtures:
            return UnitShare()
        size = next((FORMATS[kernel.dtype].bytes for kernel in unit.forward if kernel.kind == "matmul"), WIDE_BYTES)
        counts = [Sent(kind="all_to_all", bytes=float(one.experts * INDEX_BYTES)) for one in mixtures]
        rows = [
            replace(sent, bytes=sent.bytes * self._crowding(one))
            for one in mixtures
            for sent in _rows_sent(one, samples, size)
        ]
        again = counts + rows if _is_recomputed(unit) else []
        surplus = self._surplus(mixtures, samples, unit) if self._worst else None
        return UnitShare(forward=(*counts, *rows), backward=(*again, *rows), surplus=surplus)

    def _crowding(self, one: ExpertFacts) -> float:
        """Rows that a rank receives, relative to those of balanced routing."""
        return self._ranks * min(1.0, one.experts / self._ranks / one.chosen) if self._worst else 1.0

    def _surplus(self, mixtures: list[ExpertFacts], samples: int, unit: UnitCosts) -> Surplus:
        dtype = next((kernel.dtype for kernel in unit.forward if kernel.kind == "matmul"), "fp32")
        flops = kept = 0.0
        for one in mixtures:
            rows = (self._crowding(one) - 1) * one.rows * samples
            elements, inner = self._sizes(one)
            flops += 2 * rows * elements
            # Of a row: what enters and leaves, and what each matrix but the last makes, before and after the
            # nonlinearity.
            kept += rows * FORMATS[dtype].bytes * 2 * (one.width + elements / max(1, one.width) - inner)
        size = Size(flops)
        return Surplus(product=Kernel(name="experts", kind="matmul", dtype=dtype, flops=size, bytes=Size()), kept=kept)

    def _sizes(self, one: ExpertFacts) -> tuple[float, int]:
        """Elements of an expert's matrices, and the width of the last matrix's input."""
        own = set(one.parameters)
        shapes = [p.shape[int(one.stacked) :] for p in self._facts.parameters if own.intersection(p.names)]
        matrices = [shape for shape in shapes if len(shape) == 2]
        elements = sum(first * second for first, second in matrices) / (1 if one.stacked else one.experts)
        return elements, min((side for shape in matrices for side in shape if side != one.width), default=0)


def _rows_sent(one: ExpertFacts, samples: int, size: int) -> list[Sent]:
    """Tokens to their experts and results back, or their gradients the other way; and weights beside the tokens."""
    rows = one.rows * samples
    tokens = Sent(kind="all_to_all", bytes=rows * one.width * size, times=2)
    return [tokens, Sent(kind="all_to_all", bytes=rows * WIDE_BYTES)] if one.weighted else [tokens]


def _is_recomputed(unit: UnitCosts) -> bool:
    """Whether backward runs forward again: its first kernels are those of forward."""
    return bool(unit.forward) and unit.is_block and unit.backward[:1] == unit.forward[:1]
