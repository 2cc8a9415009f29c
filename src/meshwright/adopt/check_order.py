"""Mistakes in the order of a step's calls, and in loss scaling."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from meshwright.adopt.check_steps import CLIPS, updates
from meshwright.adopt.finding import Finding
from meshwright.adopt.kind import Kind
from meshwright.adopt.script import Script, last_name

Block = list[ast.stmt]


def check(script: Script, kind: Kind) -> Iterator[Finding]:
    if kind.backward:
        yield from _scaler(script, kind)
        yield from _order(script)


def _scaler(script: Script, kind: Kind) -> Iterator[Finding]:
    if not script.calls_of("GradScaler", "ShardedGradScaler") or kind.library:
        return
    scaled = [
        call
        for call in kind.backward
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Call)
        and last_name(call.func.value.func) == "scale"
    ]
    if not scaled:
        return
    unscaled = script.methods("unscale_")
    clips = [call for call in script.calls if last_name(call.func) in CLIPS]
    for clip in clips:
        if not any(
            one.lineno < clip.lineno and script.function_of(one) is script.function_of(clip) for one in unscaled
        ):
            yield Finding(
                name="clip-before-unscale",
                line=clip.lineno,
                message="Gradients are clipped while they are multiplied by the loss scale, so almost every step is "
                "clipped. Call scaler.unscale_(optimizer) first.",
            )
    steps = updates(script)
    through = [call for call in steps if call.args]
    if steps and not through:
        yield Finding(
            name="step-without-scaler",
            line=steps[0].lineno,
            message="The loss is scaled, but optimizer.step() applies the scaled gradients. Call "
            "scaler.step(optimizer).",
        )
    if through and not script.methods("update"):
        yield Finding(
            name="no-scaler-update",
            line=through[0].lineno,
            message="scaler.update() is never called, so the scale stays at its start and overflows repeat.",
        )


def _blocks(script: Script) -> Iterator[Block]:
    for node in ast.walk(script.tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _order(script: Script) -> Iterator[Finding]:
    for block in _blocks(script):
        places = {name: _place(block, name) for name in ("optimizer", "schedule", "clip", "backward")}
        step = places["optimizer"]
        if step is None:
            continue
        if places["schedule"] is not None and places["schedule"] < step:
            yield Finding(
                name="schedule-before-step",
                line=block[places["schedule"]].lineno,
                message="The schedule steps before the optimizer, which skips its first learning rate. Step it after.",
            )
        if places["clip"] is not None and places["clip"] > step:
            yield Finding(
                name="clip-after-step",
                line=block[places["clip"]].lineno,
                message="Gradients are clipped after the optimizer has used them. Clip between backward and step.",
            )
        backward = places["backward"]
        between = block[backward + 1 : step] if backward is not None else []
        zero = _place(between, "zero")
        if zero is not None:
            yield Finding(
                name="zero-before-step",
                line=between[zero].lineno,
                message="Gradients are cleared between backward and step: the step does nothing. Clear them after it.",
            )


def _place(block: Block, what: str) -> int | None:
    """Where the first statement of a block does something, on its own or inside a plain `if`."""
    for place, statement in enumerate(block):
        own = [statement.value] if isinstance(statement, ast.Expr | ast.Assign) else []
        if isinstance(statement, ast.If) and what in {"clip", "schedule"}:
            own = [one.value for one in statement.body if isinstance(one, ast.Expr)]
        if any(isinstance(one, ast.Call) and _does(one, what) for one in own):
            return place
    return None


def _does(call: ast.Call, what: str) -> bool:
    name = last_name(call.func)
    owner = last_name(call.func.value).lower() if isinstance(call.func, ast.Attribute) else ""
    if what == "clip":
        return name in CLIPS
    if what == "backward":
        return name == "backward"
    if what == "zero":
        return name == "zero_grad"
    if name != "step":
        return False
    if what == "schedule":
        return "sched" in owner and "opt" not in owner
    return (owner.endswith("optimizer") or owner in {"opt", "optim"}) or (owner == "scaler" and bool(call.args))
