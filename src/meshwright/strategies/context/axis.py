"""`cp=N`: context parallelism, dividing the tokens of every sample through the whole step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy
from meshwright.strategies.model_axis import InnerAxis

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.cuts import Cuts


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
        },
        missing={"deepspeed": "DeepSpeed divides sequences by its own attention layers (Ulysses), not by its config"},
    )

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        if facts.unseen:
            return f"{term} needs a model that runs on fake tensors, but this one does not: {facts.unseen}"
        return None

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        from meshwright.strategies.context.split import split_tokens  # lazily, because it imports DTensor

        split_tokens(model, mesh, facts.blocks)
        return {}

    def region(self, mesh: DeviceMesh) -> AbstractContextManager[Any]:
        from meshwright.strategies.context.mode import token_region

        return token_region(mesh)

    def whole(self, tree: Any, mesh: DeviceMesh) -> Any:
        from meshwright.strategies.context.split import to_plain

        return to_plain(tree, mesh)
