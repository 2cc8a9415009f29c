"""`tp=N`: tensor parallelism with sequence parallelism, dividing pairs of linear layers by columns and rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import UnitCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy
from meshwright.strategies.model_axis import Division, InnerAxis, Sent, UnitShare

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
        compiles=True,
        pieces_loss=True,
        float8=True,
        config_fields={
            "torchtitan": "tensor_parallel_degree",
            "accelerate": "parallelism_config_tp_size",
            "deepspeed": "autotp_size",
            "megatron": "tensor-model-parallel-size",
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

    def undivided(self, facts: ModelFacts, ranks: int) -> dict[str, str]:
        if facts.tensor_plan is None:
            return {}
        pairs = zip(facts.tensor_plan.rows, facts.tensor_plan.for_ranks(ranks).rows, strict=True)
        return {new.module: new.reason for old, new in pairs if old.role != "whole" and new.role == "whole"}

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        from meshwright.strategies.tensor.split import split_tensors  # lazily, because it imports DTensor

        assert facts.tensor_plan is not None
        return split_tensors(model, facts.tensor_plan, mesh, facts.blocks)

    def region(self, mesh: DeviceMesh) -> AbstractContextManager[Any]:
        from meshwright.strategies.tensor.mode import tensor_region

        return tensor_region(mesh)

    def float8_linear(self, mesh: DeviceMesh) -> Callable[..., Any]:
        from meshwright.strategies.tensor.matrix import linear_in_float8

        return partial(linear_in_float8, mesh)

    def compile_blocks(self, blocks: Sequence[nn.Module]) -> None:
        from meshwright.strategies.tensor.draft import compile_programs

        compile_programs(blocks)

    def whole(self, tree: Any, mesh: DeviceMesh) -> Any:
        from meshwright.strategies.tensor.split import to_plain

        return to_plain(tree, mesh)

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        return TensorDivision(facts, ranks)


class TensorDivision(Division):
    """What a rank holds, computes and sends, from the tensor plan."""

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
        return UnitShare(
            parts=parts,
            regathered=regathered,
            beside=self._kept_by_programs(unit, samples) / parts if layers else 0.0,
            forward=sent,
            backward=sent,
            intercepted=layers > 0 and not unit.is_block,
        )

    def _kept_by_programs(self, unit: UnitCosts, samples: int) -> float:
        """Bytes that a block's program keeps and its plain forward does not, in all ranks together (`rewrite.py`).

        Query, key and value are one product. Attention keeps the value, a view of it, and so the query and key from
        before their rotation too. Its output is copied to the order in which ranks send rows.
        """
        found, products = 0.0, list[float]()
        for before, kernel in pairwise(unit.forward):
            products += [before.made.at(samples)] if before.kind == "matmul" else []
            if kernel.kind == "attention":
                rotated = before.kind != "matmul" and len(products) > 1
                found += sum(products) - min(products) if rotated else 0.0
                found += kernel.made.at(samples) if self._sequence else 0.0
                products.clear()
        return found

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
