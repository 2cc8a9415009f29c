"""What a rank of `ep=N` holds, computes and sends, from a model's facts alone."""

from __future__ import annotations

from meshwright.facts.costs import UnitCosts
from meshwright.facts.model import ExpertFacts, ModelFacts
from meshwright.facts.precision import FORMATS
from meshwright.strategies.model_axis import Division, Sent, UnitShare

INDEX_BYTES = 8
"""Of one count of rows."""
WIDE_BYTES = 4
"""Of a routing weight: routers compute in fp32."""


class ExpertDivision(Division):
    """Experts are divided, and with balanced routing a rank computes as many rows as it has itself."""

    def __init__(self, facts: ModelFacts, ranks: int) -> None:
        self._ranks, self._mixtures = ranks, facts.experts
        self._names = {name for one in facts.experts for name in one.parameters}

    def parts_of(self, names: tuple[str, ...]) -> int:
        return self._ranks if names[0] in self._names else 1

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        own = set(unit.parameters)
        mixtures = [one for one in self._mixtures if own.intersection(one.parameters)]
        if not mixtures:
            return UnitShare()
        size = next((FORMATS[kernel.dtype].bytes for kernel in unit.forward if kernel.kind == "matmul"), WIDE_BYTES)
        counts = [Sent(kind="all_to_all", bytes=float(one.experts * INDEX_BYTES)) for one in mixtures]
        rows = [sent for one in mixtures for sent in _rows_sent(one, samples, size)]
        again = counts + rows if _is_recomputed(unit) else []
        return UnitShare(forward=(*counts, *rows), backward=(*again, *rows))


def _rows_sent(one: ExpertFacts, samples: int, size: int) -> list[Sent]:
    """Tokens to their experts and results back, or their gradients the other way; and weights beside the tokens."""
    rows = one.rows * samples
    tokens = Sent(kind="all_to_all", bytes=rows * one.width * size, times=2)
    return [tokens, Sent(kind="all_to_all", bytes=rows * WIDE_BYTES)] if one.weighted else [tokens]


def _is_recomputed(unit: UnitCosts) -> bool:
    """Whether backward runs forward again: its first kernels are those of forward."""
    return bool(unit.forward) and unit.is_block and unit.backward[:1] == unit.forward[:1]
