"""What a loop does beside the step of a job, and would be lost without a word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from meshwright.adopt.draft import Draft
from meshwright.adopt.model_code import LOOKS
from meshwright.adopt.script import called_on, last_name
from meshwright.adopt.slices import stored_names, touched_names

RANDOM = re.compile(r"\b(rand\w*|beta|permutation|shuffle|bernoulli|multinomial|normal|uniform|dirichlet)\(")
USUAL = (
    "step", "zero_grad", "backward", "unscale_", "update", "clip_grad_norm_", "clip_gradients", "clip_grad_value_",
    "train", "eval", "save", "save_checkpoint", "save_state", "save_pretrained", "save_model", "push_to_hub",
    "manual_backward", "append", "write", "synchronize", "wait", "add_scalar", "flush", "empty_cache", "collect",
    "add_batch", "record",
)  # fmt: skip
"""Calls that a job makes itself, or that leave the training as it is."""


def note_left_out(draft: Draft) -> None:
    """Leave to the user what the loop changes outside forward, loss, clipping and update."""
    model = draft.parts.model
    for statement in _inside(draft.parts.inner):
        if model and model in touched_names(statement) - stored_names(statement) and not _is_usual(statement):
            text = ast.unparse(statement).splitlines()[0]
            draft.leave(statement.lineno, f"the loop changes the model here, and a job does not: {text}")
        for call in _calls_of_eval(statement):
            owner = ast.unparse(called_on(call))
            if owner.startswith((f"{model}.", f"{model}[")) and owner != f"{model}.module":
                draft.leave(
                    call.lineno, f"{ast.unparse(call)} keeps a part in eval mode; do that in the model's train()."
                )
    for statement in draft.parts.prelude:
        if set(draft.parts.optimizers) & touched_names(statement) and "add_param_group" in ast.unparse(statement):
            draft.leave(statement.lineno, "optimizer: a group is added later; build it in job_optimizer.")


def note_random(draft: Draft, statements: list[ast.stmt]) -> None:
    """A step that draws numbers before the model: inputs and loss would draw different ones."""
    for statement in statements:
        if RANDOM.search(ast.unparse(statement)):
            draft.leave(statement.lineno, "the step draws random numbers for its batch; draw them in `collate`.")


def _inside(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The simple statements of loops and branches, and loops over parameters as a whole."""
    for statement in statements:
        inner = [*getattr(statement, "body", []), *getattr(statement, "orelse", [])]
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        is_over_parameters = isinstance(statement, ast.For) and "parameters(" in ast.unparse(statement.iter)
        if inner and not is_over_parameters:
            yield from _inside(inner)
        else:
            yield statement


def _is_usual(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.For):
        text = ast.unparse(statement)
        return "all_reduce" in text or ".grad = None" in text  # averaging over ranks, clearing
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return isinstance(statement, ast.Assign) and "require_backward_grad_sync" in ast.unparse(statement)
    name = last_name(statement.value.func)
    return name in USUAL or any(word in name.lower() for word in (*LOOKS, "save", "plot", "sample", "generate"))


def _calls_of_eval(statement: ast.stmt) -> list[ast.Call]:
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "eval"]
