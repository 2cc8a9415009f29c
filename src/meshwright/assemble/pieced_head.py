"""Apply `loss=pieced`: make a model's output layer return logits that the loss computes in pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.assemble.operator_dtypes import low
from meshwright.describe.dtypes import LOW
from meshwright.facts.model import HeadFacts, ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.pieced_loss.head import HeadCalls, Output
from meshwright.pieced_loss.rows import compiled_gradient
from meshwright.recording.wrap_forward import wrap_forward


def piece_head(model: nn.Module, head: HeadFacts, dtype: torch.dtype, *, compiled: bool) -> None:
    """Put off the products of the output layer, as long as only the loss needs them."""
    output = Output(shape=(head.classes, head.width), gradient=compiled_gradient() if compiled else None)
    mode = HeadCalls(output, partial(_lowered, dtype) if dtype in LOW else _plain)

    def run(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    wrap_forward(model.get_submodule(head.module), run)


def _lowered(dtype: torch.dtype, product: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return low(product, dtype, args, kwargs)


def _plain(product: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return product(*args, **kwargs)


def refuse_pieced(facts: ModelFacts, strategy: Strategy) -> str | None:
    """Why the loss cannot be computed in pieces, or None."""
    head, term = facts.head, "loss=pieced"
    if strategy.loss != "pieced":
        return None
    if head is None:
        return (
            facts.unseen
            and f"{term} needs a model that runs on fake tensors: {facts.unseen}"
            or (
                f"{term} needs a model whose output layer is a linear layer that F.cross_entropy or F.nll_loss reads with "
                f"class indices, and this model has none; drop {term}."
            )
        )
    if facts.loss_over != "samples":
        return (
            f"{term} needs a loss that is a sum over samples, but this one is over the {facts.loss_over}; drop {term}."
        )
    if strategy.compile and (reason := _refuse_compiled(facts, head)):
        return reason
    return _refuse_undivided(facts, head, strategy)


def _refuse_compiled(facts: ModelFacts, head: HeadFacts) -> str | None:
    """With `compile`, blocks are compiled and the output layer is not."""
    if not facts.blocks:
        return "loss=pieced with compile compiles a model's blocks, and this model has none; drop one of the two terms."
    around = next((block for block in facts.blocks if f"{head.module}.".startswith(f"{block}.")), None)
    if around is not None:
        return f"The output layer {head.module} is inside the block {around}, which compile compiles; drop loss=pieced."
    return None


def _refuse_undivided(facts: ModelFacts, head: HeadFacts, strategy: Strategy) -> str | None:
    """An axis that divides activations must divide the classes too: whole ones would be computed on every rank."""
    if not strategy.splits_activations or facts.tensor_plan is None:
        return None
    plan = facts.tensor_plan.for_ranks(strategy.inner_ranks)
    if any(row.module == head.module for row in plan.divided):
        return None
    return (
        f"loss=pieced needs an output layer whose classes the ranks divide, but {strategy} leaves "
        f"{head.module or 'the output layer'} ({head.classes} classes) whole; drop loss=pieced."
    )
