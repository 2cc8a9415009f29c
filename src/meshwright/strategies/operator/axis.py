"""`op=N`: each large operator is divided separately, and its result is combined right after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy
from meshwright.strategies.model_axis import Division, InnerAxis

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.cuts import Cuts
    from meshwright.strategies.operator.split import OperatorPlan


class OperatorParallel(InnerAxis):
    summary = "operator-wise: each large linear, convolution, embedding or attention operator divided by itself"
    traits = AxisTraits(
        word="op",
        mesh_name="tensor",
        place=20,
        splits_tensors=True,
        autocast=False,
        missing={
            "torchtitan": "torchtitan does not divide single operators",
            "accelerate": "Accelerate does not divide single operators",
            "deepspeed": "DeepSpeed does not divide single operators",
        },
    )

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        if facts.unseen:
            return f"op={term.size} needs a model that runs on fake tensors, but this one does not: {facts.unseen}"
        return None

    def refuse_job(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> str | None:
        self._plan_job(job, facts, term.size)  # raises where nothing can be divided
        return None

    def show(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> dict[str, Any]:
        rows = [
            {"module": one.name, "kind": one.kind, "divides": "" if one.why else one.along, "why": one.why}
            for one in self._plan_job(job, facts, term.size).operators
        ]
        return {"operators": rows}

    def _plan_job(self, job: Job, facts: ModelFacts, ranks: int) -> OperatorPlan:
        from meshwright.recording.blueprint import model_to_read

        return self.plan(model_to_read(job.model), facts, ranks)

    def plan(self, model: nn.Module, facts: ModelFacts, ranks: int) -> OperatorPlan:
        from meshwright.strategies.operator.split import plan_operators

        return plan_operators(model, ranks, frozenset(facts.read_elsewhere))

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        from meshwright.strategies.operator.split import split_operators

        return split_operators(model, plan, mesh)

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        from meshwright.strategies.operator.division import OperatorDivision

        return OperatorDivision(facts, ranks)
