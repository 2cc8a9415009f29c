"""`cp=N`: context parallelism, dividing the tokens of every sample through the whole step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy
from meshwright.strategies.context.division import ContextDivision
from meshwright.strategies.model_axis import Division, InnerAxis

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.cuts import Cuts

LEAST_TOKENS = 4096
"""Tokens of a rank below which the planner does not try the axis by itself: data and tensor axes divide short samples
with fewer messages."""


class ContextParallel(InnerAxis):
    summary = "context parallelism: each sample's tokens divided; keys and values gathered for attention"
    traits = AxisTraits(
        word="cp",
        mesh_name="context",
        place=5,
        splits_activations=True,
        shares_gradients=True,
        autocast=False,
        config_fields={
            "torchtitan": "context_parallel_degree",
            "accelerate": "parallelism_config_cp_size",
            "megatron": "context-parallel-size",
        },
        missing={"deepspeed": "DeepSpeed divides sequences by attention layers of its own, not by its config"},
    )

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        if facts.unseen:
            return f"{term} needs a model that runs on fake tensors, but this one does not: {facts.unseen}"
        if not facts.tokens:
            return f"{term} divides tokens, but no block of this model returns (batch, tokens, width); use fsdp or tp."
        if whole := [tokens for tokens in facts.tokens if tokens % term.size]:
            return (
                f"{term} divides the tokens of each sample evenly, but {_where(facts)} {whole[0]} of them; pad samples "
                f"to a multiple of {term.size} tokens, or use fsdp or tp."
            )
        if operator := next((one for one in strategy.inner_axes if one != term and _is_alone(one)), None):
            return f"{term} cannot be combined with {operator}, which communicates whole tensors; use tp."
        return None

    def sizes(self, facts: ModelFacts, cluster: Cluster) -> Collection[int]:
        if not facts.tokens:
            return ()
        most = min(cluster.devices, facts.tokens[0] // LEAST_TOKENS)
        return [size for size in range(2, most + 1) if not any(tokens % (2 * size) for tokens in facts.tokens)]

    def compared(self, ranks: int) -> Iterator[str]:
        yield from ()  # short samples, as most jobs have, only show its costs

    def show(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> dict[str, Any]:
        balanced = self.plan(None, facts, term.size)
        return {"tokens": {"all": list(facts.tokens), "ranks": term.size, "chunks": 2 if balanced else 1}}

    def plan(self, model: nn.Module | None, facts: ModelFacts, ranks: int) -> bool:
        """Whether a rank's tokens are two chunks, from the beginning and from the end, and not one."""
        return not any(tokens % (2 * ranks) for tokens in facts.tokens)

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        from meshwright.strategies.context.split import split_tokens  # lazily, because it imports DTensor

        split_tokens(model, mesh, facts.blocks, balanced=plan)
        return {}

    def region(self, mesh: DeviceMesh) -> AbstractContextManager[Any]:
        from meshwright.strategies.context.mode import token_region

        return token_region(mesh)

    def whole(self, tree: Any, mesh: DeviceMesh) -> Any:
        from meshwright.strategies.context.split import to_plain

        return to_plain(tree, mesh)

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        return ContextDivision(ranks)


def _is_alone(term: AxisTerm) -> bool:
    """Whether an axis keeps activations whole between its operators, on tensors that nothing else divides."""
    return term.traits.splits_tensors and not term.traits.splits_activations


def _where(facts: ModelFacts) -> str:
    return f"{facts.blocks[0]} returns" if facts.blocks else "a block returns"
