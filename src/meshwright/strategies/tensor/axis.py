"""`tp=N`: tensor parallelism with sequence parallelism, dividing pairs of linear layers by columns and rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy
from meshwright.strategies.model_axis import Division, InnerAxis

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.cuts import Cuts


class TensorParallel(InnerAxis):
    summary = "tensor parallelism: linear layers in pairs, attention by heads, activations between them by sequence"
    traits = AxisTraits(
        word="tp",
        mesh_name="tensor",
        place=20,
        conflict="both split the operators; tp pairs them, op splits each alone",
        splits_tensors=True,
        splits_activations=True,
        autocast=False,
        config_fields={
            "torchtitan": "tensor_parallel_degree",
            "accelerate": "parallelism_config_tp_size",
            "deepspeed": "autotp_size",
        },
        missing={"deepspeed": "DeepSpeed's AutoTP (tensor_parallel.autotp_size) knows models of transformers only"},
    )

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        if facts.tensor_plan is None:
            return f"tp={term.size} needs a model that runs on fake tensors, but this one does not: {facts.unseen}"
        return facts.tensor_plan.refuse(term.size)

    def sizes(self, facts: ModelFacts, cluster: Cluster) -> Collection[int]:
        return range(2, cluster.devices_per_node + 1)

    def compared(self, ranks: int) -> Iterator[str]:
        for term in super().compared(ranks):
            yield term
            if term != f"tp={ranks}":
                yield f"fsdp,{term}"

    def show(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> dict[str, Any]:
        assert facts.tensor_plan is not None
        plan = facts.tensor_plan.for_ranks(term.size)
        rows = [dict(zip(("module", "role", "divides", "why"), row, strict=True)) for row in plan.table()]
        return {"tensor_plan": plan.as_mapping(), "tensor": rows}

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        from meshwright.strategies.tensor.split import split_tensors  # lazily, because it imports DTensor

        assert facts.tensor_plan is not None
        return split_tensors(model, facts.tensor_plan, mesh, facts.blocks)

    def region(self, mesh: DeviceMesh) -> AbstractContextManager[Any]:
        from meshwright.strategies.tensor.mode import tensor_region

        return tensor_region(mesh)

    def whole(self, tree: Any, mesh: DeviceMesh) -> Any:
        from meshwright.strategies.tensor.split import to_plain

        return to_plain(tree, mesh)

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        from meshwright.strategies.tensor.division import TensorDivision

        return TensorDivision(facts, ranks)
