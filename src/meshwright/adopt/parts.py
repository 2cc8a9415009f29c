"""The parts of a training in a straight script: model, optimizer, schedule, data, and the step."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field


@dataclass
class Parts:
    """What takes part in the training. Names are those of the straight script; None and empty if not found."""

    prelude: list[ast.stmt] = field(default_factory=list)
    """Statements before the loop over batches, outermost first."""
    step: list[ast.stmt] = field(default_factory=list)
    """Statements of the loop over batches up to the backward pass."""
    loop: ast.For | None = None
    """The loop over batches."""
    inner: list[ast.stmt] = field(default_factory=list)
    """Everything in the innermost loop over steps."""
    backward: list[ast.Call] = field(default_factory=list)
    loss: ast.expr | None = None
    """What backward is called on, without loss scaling."""
    model: str = ""
    optimizers: dict[str, ast.Call] = field(default_factory=dict)
    """Optimizers by name."""
    made_by_model: ast.Call | None = None
    """The call of a model's own method that makes the optimizer."""
    schedule: str = ""
    schedule_call: ast.Call | None = None
    by_epoch: bool = False
    """Whether the schedule steps once per epoch."""
    loader: str = ""
    loader_call: ast.Call | None = None
    clip: ast.expr | None = None
    clips_values: bool = False
    accumulation: ast.expr | None = None
    """Batches of one step."""
