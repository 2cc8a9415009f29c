"""What a rank of `tp=N` holds, computes and sends: the tensor plan for the planner."""

from __future__ import annotations

from copy import copy

from meshwright.facts.costs import UnitCosts
from meshwright.facts.model import ModelFacts
from meshwright.strategies.model_axis import Division, Sent, UnitShare


class TensorDivision(Division):
    def __init__(self, facts: ModelFacts, ranks: int) -> None:
        plan = facts.tensor_plan
        self._ranks = ranks
        self._roles = {row.module: row.role for row in plan.for_ranks(ranks).divided} if plan else {}
        self._sequence = plan is not None and plan.sequence
        self.boundary_parts = ranks if self._sequence else 1

    def parts_of(self, names: tuple[str, ...]) -> int:
        return self._ranks if any(name.rpartition(".")[0] in self._roles for name in names) else 1

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        layers = self._summed_layers(unit)
        parts = self._ranks if layers or self._sequence else 1
        # A head's output stays divided, so no layer sends more than the activations between blocks.
        sent = self._messages(min(unit.output.at(samples), stream), layers) if layers else ()
        # A divided layer's input is gathered, and autograd keeps it whole for the weight's gradient.
        regathered = layers * stream * (1 - 1 / parts)
        return UnitShare(parts=parts, regathered=regathered, forward=sent, backward=sent, intercepted=layers > 0)

    def _summed_layers(self, unit: UnitCosts) -> int:
        """The number of layers whose outputs are summed over ranks: row layers and vocabularies."""
        modules = {name.rpartition(".")[0] for name in unit.parameters}
        return sum(self._roles.get(module, "column") != "column" for module in modules)

    def _messages(self, size: float, layers: int) -> tuple[Sent, ...]:
        """The collectives of a pass. With a divided sequence, each layer gathers its input and scatters its output."""
        kinds = ("all_gather", "reduce_scatter") if self.boundary_parts > 1 else ("all_reduce",)
        return tuple(Sent(kind=kind, bytes=size, times=layers) for kind in kinds)

    def without_sequence(self) -> TensorDivision:
        """The same with sums of whole tensors. The memory stays that of a divided sequence, as an estimate."""
        found = copy(self)
        found.boundary_parts = 1
        return found
