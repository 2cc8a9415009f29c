"""Find what updates the weights in a straight script: optimizer, schedule and clipping, and the model behind them."""

from __future__ import annotations

import ast

from meshwright.adopt.flatten import Flat
from meshwright.adopt.kind import OPTIMIZERS
from meshwright.adopt.loaders import made_by
from meshwright.adopt.parts import Parts
from meshwright.adopt.script import Script, argument, called_on, last_name
from meshwright.adopt.slices import read_names, stored_names

CLIPS = ("clip_grad_norm_", "clip_gradients")


def find_optimizer(script: Script, flat: Flat, parts: Parts) -> None:
    parts.optimizers = dict(made_by(script, parts.prelude, (*OPTIMIZERS, "ZeroRedundancyOptimizer")))
    if not parts.optimizers:
        parts.made_by_model = next((one for one in map(_made_by_method, parts.prelude) if one is not None), None)
        parts.model = ast.unparse(called_on(parts.made_by_model)) if parts.made_by_model is not None else ""
    if parts.optimizers:
        call = list(parts.optimizers.values())[-1]
        parts.model = _owner(call) or _owner_through(parts.prelude, call)


def _made_by_method(statement: ast.stmt) -> ast.Call | None:
    """The call of `optimizer = model.configure_optimizers(...)`."""
    call = getattr(statement, "value", None)
    if (
        not isinstance(statement, ast.Assign)
        or not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Attribute)
    ):
        return None
    is_method = "optim" in call.func.attr and isinstance(call.func.value, ast.Name)
    return call if is_method and isinstance(statement.targets[0], ast.Name) else None


def _owner(node: ast.AST) -> str:
    """The model whose parameters an expression reads."""
    for one in ast.walk(node):
        if (
            isinstance(one, ast.Call)
            and last_name(one.func) in ("parameters", "named_parameters")
            and isinstance(one.func, ast.Attribute)
        ):
            base = one.func.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name):
                return base.id
    return ""


def _owner_through(prelude: list[ast.stmt], call: ast.Call) -> str:
    wanted = read_names(call)
    for statement in reversed(prelude):
        if stored_names(statement) & wanted:
            if found := _owner(statement):
                return found
            wanted |= read_names(statement)
    return ""


def find_schedule(script: Script, flat: Flat, parts: Parts) -> None:
    for statement in parts.prelude:
        for node in ast.walk(statement):
            if not (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and isinstance(node.targets[0], ast.Name)
            ):
                continue
            source = script.dotted(node.value.func)
            given = {ast.unparse(one) for one in [*node.value.args, *(word.value for word in node.value.keywords)]}
            if (
                given & set(parts.optimizers)
                and ("lr_scheduler" in source or "schedule" in source.lower())
                and _steps(flat, node.targets[0].id)
            ):
                parts.schedule, parts.schedule_call = node.targets[0].id, node.value
    if parts.schedule:
        loop = parts.inner[0] if parts.inner else None
        inside = [] if loop is None else [node for node in ast.walk(loop) if _is_step(node, parts.schedule)]
        parts.by_epoch = not inside


def _steps(flat: Flat, name: str) -> bool:
    return any(_is_step(node, name) for statement in flat.statements for node in ast.walk(statement))


def _is_step(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and ast.unparse(node.func.value) == name
    )


def find_clip(parts: Parts, everything: list[ast.AST]) -> None:
    for node in everything:
        if isinstance(node, ast.Call) and last_name(node.func) in CLIPS:
            parts.clip = (
                argument(node, 1, "max_norm")
                if last_name(node.func) == "clip_grad_norm_"
                else argument(node, 9, "max_norm")
            )
            if parts.clip is None and len(node.args) == 1:
                parts.clip = node.args[0]  # model.clip_grad_norm_(1.0)
        parts.clips_values |= isinstance(node, ast.Call) and last_name(node.func) == "clip_grad_value_"
