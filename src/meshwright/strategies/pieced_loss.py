"""Which models and strategies can compute output layer and loss in pieces."""

from __future__ import annotations

from meshwright.facts.model import HeadFacts, ModelFacts
from meshwright.facts.strategy import Strategy


def refuse_pieced(facts: ModelFacts, strategy: Strategy) -> str | None:
    """Why the loss cannot be computed in pieces, or None."""
    if strategy.loss != "pieced":
        return None
    if facts.head is None:
        return _no_head(facts)
    if facts.loss_over != "samples":
        return (
            f"loss=pieced needs a loss that is a sum over samples, but this one is over the {facts.loss_over}; drop it."
        )
    if strategy.compile and (reason := _refuse_compiled(facts, facts.head)):
        return reason
    return _refuse_undivided(facts, facts.head, strategy)


def _no_head(facts: ModelFacts) -> str:
    if facts.unseen:
        return f"loss=pieced needs a model that runs on fake tensors, but this one does not: {facts.unseen}"
    return (
        "loss=pieced needs a model that ends in a linear layer whose output F.cross_entropy or F.nll_loss reads with "
        "class indices as targets, and this model does not; drop loss=pieced."
    )


def _refuse_compiled(facts: ModelFacts, head: HeadFacts) -> str | None:
    """With `compile`, blocks are compiled and the output layer is not."""
    if not facts.blocks:
        return "loss=pieced with compile compiles a model's blocks, and this model has none; drop one of the two terms."
    around = next((block for block in facts.blocks if f"{head.module}.".startswith(f"{block}.")), None)
    if around is not None:
        return f"The output layer {head.module} is inside the block {around}, which compile compiles; drop loss=pieced."
    return None


def _refuse_undivided(facts: ModelFacts, head: HeadFacts, strategy: Strategy) -> str | None:
    """An axis that divides activations must divide the classes too: every rank would compute all of them."""
    if not strategy.splits_activations or facts.tensor_plan is None:
        return None
    plan = facts.tensor_plan.for_ranks(strategy.inner_ranks)
    if any(row.module == head.module for row in plan.divided):
        return None
    return (
        f"loss=pieced needs an output layer whose classes the ranks divide, but {strategy} leaves "
        f"{head.module or 'the output layer'} ({head.classes} classes) whole; drop loss=pieced."
    )
