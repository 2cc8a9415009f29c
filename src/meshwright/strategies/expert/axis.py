"""`ep=N`: the experts of each mixture divided over ranks inside the data axis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.model import ExpertFacts, ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy
from meshwright.strategies.expert.division import ExpertDivision
from meshwright.strategies.model_axis import Division, InnerAxis

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.cuts import Cuts


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """What is done with each mixture."""

    mixtures: tuple[ExpertFacts, ...] = ()
    counters: dict[str, Any] = field(default_factory=dict)
    """For each module of stacked experts, its attributes that count them, with a rank's number."""
    failed: str = ""
    """Why a mixture cannot be divided; empty if all can."""


class ExpertParallel(InnerAxis):
    summary = "the experts of each mixture divided over data ranks; tokens are sent to the experts that they chose"
    traits = AxisTraits(
        word="ep",
        mesh_name="expert",
        place=5,
        splits_batch=True,
        splits_tensors=True,
        autocast=False,
        complexity=8,
        config_fields={"torchtitan": "expert_parallel_degree", "megatron": "expert-model-parallel-size"},
        missing={
            "accelerate": "Accelerate's config has no field for experts that are divided over ranks",
            "deepspeed": "DeepSpeed divides only its own mixtures of experts",
        },
    )

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        if not facts.experts:
            return (
                f"{term} divides experts, and none were found in this model: a module with stacked weights [experts, "
                "...] that is called with tokens, indices and weights, or a list of alike modules of which each gets "
                "some rows; use ddp or fsdp."
            )
        uneven = [one for one in facts.experts if one.experts % term.size]
        if uneven:
            return (
                f"{term} was asked, but {uneven[0].module} has {uneven[0].experts} experts, which {term.size} ranks "
                "cannot divide; use a number of ranks that divides them."
            )
        if other := next((one for one in strategy.inner_axes if one.traits.shares_gradients), None):
            return f"{term} cannot be combined with {other}: both change who sums gradients; use one of them."
        beside = next((other for other in strategy.inner_axes if other != term and other.traits.splits_tensors), None)
        if beside and (listed := [one.module for one in facts.experts if not one.stacked]):
            return (
                f"{term} with {beside} divides only experts that are stacked weights, and those of {listed[0]} are "
                f"modules, whose layers {beside.word} would divide too; use {term} with ddp, fsdp or pp."
            )
        tied = {name for p in facts.parameters if len(p.names) > 1 for name in p.names}
        if shared := [name for one in facts.experts for name in one.parameters if name in tied]:
            return f"{term} cannot divide {shared[0]}, which is tied to another parameter; use ddp or fsdp."
        return None

    def refuse_job(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> str | None:
        from meshwright.recording.blueprint import model_to_read

        if failed := self.plan(model_to_read(job.model), facts, term.size).failed:
            return f"{term} was asked, but {failed}; use ddp or fsdp."
        return None

    def sizes(self, facts: ModelFacts, cluster: Cluster) -> Collection[int]:
        """Powers of two that divide every mixture, as far as messages between few nodes reach."""
        counts = [one.experts for one in facts.experts]
        sizes = (1 << power for power in range(1, 7))
        return [size for size in sizes if counts and size <= cluster.devices and not any(n % size for n in counts)]

    def show(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> dict[str, Any]:
        rows = [
            {
                "module": one.module,
                "experts": one.experts,
                "per rank": one.experts // term.size,
                "form": "stacked weights" if one.stacked else "modules",
            }
            for one in facts.experts
        ]
        return {"experts": rows}

    def plan(self, model: nn.Module, facts: ModelFacts, ranks: int) -> ExpertPlan:
        from meshwright.strategies.expert.listed import refuse_listed
        from meshwright.strategies.expert.proof import prove

        counters = {}
        for one in facts.experts:
            if not one.stacked:
                if reason := refuse_listed(model, one, facts):
                    return ExpertPlan(failed=reason)
                continue
            proof = prove(model.get_submodule(one.module), one, ranks)
            if proof.failed:
                return ExpertPlan(failed=proof.failed)
            counters[one.module] = proof.counters
        return ExpertPlan(mixtures=facts.experts, counters=counters)

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        from meshwright.strategies.expert.listed import split_listed
        from meshwright.strategies.expert.stacked import split_stacked

        cuts: Cuts = {}
        for one in plan.mixtures:
            module = model.get_submodule(one.module)
            if not any(True for _ in module.parameters()):
                continue  # another stage has it
            if one.stacked:
                cuts |= split_stacked(module, one, plan.counters[one.module], mesh)
            else:
                cuts |= split_listed(module, model.get_submodule(one.caller), one, mesh)
        return cuts

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        return ExpertDivision(facts, ranks)
