"""What a rank of `ep=N` holds, computes and sends, from a model's facts alone."""

from __future__ import annotations

from meshwright.facts.costs import UnitCosts
from meshwright.facts.model import ExpertFacts, ModelFacts
from meshwright.strategies.model_axis import Division, Sent, UnitShare

INDEX_BYTES = 8
"""Of one count of rows."""


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
        forward = tuple(sent for one in mixtures for sent in self._forward(one, samples))
        return UnitShare(forward=forward, backward=tuple(s for one in mixtures for s in self._backward(one, samples)))

    def _forward(self, one: ExpertFacts, samples: int) -> list[Sent]:
        counts = Sent(kind="all_to_all", bytes=float(one.experts * INDEX_BYTES))
        return [counts, *self._backward(one, samples)]

    def _backward(self, one: ExpertFacts, samples: int) -> list[Sent]:
        rows = one.rows * samples
        tokens = Sent(kind="all_to_all", bytes=rows * one.width * 4, times=2)
        return [tokens, Sent(kind="all_to_all", bytes=rows * 4)] if one.weighted else [tokens]
