"""What a checkpoint of a model in a user's loop knows of its optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwright.errors import CheckpointError


class NoOptimizer:
    """The optimizer's state of a model that has no optimizer."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


def refuse_unsaved(given: Optimizer | None, updaters: Iterable[Optimizer], parameters: Iterable[nn.Parameter]) -> None:
    """Raise if a checkpoint with the optimizer that was `given` would lose the state of one.

    `updaters` have updated the model, whose parameters are `parameters`.
    """
    owned = {id(parameter) for parameter in parameters}
    held = given.param_groups if given is not None else []
    if any(one is not given for one in updaters):
        reason = "has an optimizer that was not given to mw.parallelize(optimizer=...)"
    elif any(id(parameter) not in owned for group in held for parameter in group["params"]):
        reason = "shares its optimizer with another model"
    else:
        return
    raise CheckpointError(
        f"The model {reason}, whose state a checkpoint would not hold; save the weights with weights_only=True, "
        "and the optimizer yourself."
    )
