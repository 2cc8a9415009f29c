"""Find the parts of a training in a straight script, by the way to its backward pass."""

from __future__ import annotations

import ast

from meshwright.adopt.check_data import HELD_OUT
from meshwright.adopt.flatten import Flat
from meshwright.adopt.kind import OPTIMIZERS, loss_of
from meshwright.adopt.loaders import loader_behind, loader_call, loader_name, loaders, made_by, made_in_order
from meshwright.adopt.parts import Parts
from meshwright.adopt.script import Script, keyword, last_name
from meshwright.adopt.slices import read_names
from meshwright.adopt.updates import find_clip, find_optimizer, find_schedule


def find_parts(script: Script, flat: Flat) -> Parts:
    parts = Parts()
    everything = [node for statement in flat.statements for node in ast.walk(statement)]
    parts.backward = [node for node in everything if isinstance(node, ast.Call) and _is_backward(node)]
    path = _path(flat.statements, parts.backward[0]) if parts.backward else []
    if path:
        _split(script, flat, parts, path)
    else:
        parts.prelude = _before_loops(script, flat)
    find_optimizer(script, flat, parts)
    find_schedule(script, flat, parts)
    if parts.loop is not None:
        parts.loader = loader_name(parts.loop.iter)
    elif not path:
        parts.loader = next((name for name in made_in_order(script, parts) if not HELD_OUT.search(name)), "")
    parts.loader = loader_behind(script, flat, parts.loader)
    parts.loader_call = loader_call(script, parts)
    if parts.backward:
        parts.loss = loss_of(parts.backward[0])
    find_clip(parts, everything)
    parts.accumulation = parts.accumulation or _of_accelerator(everything)
    return parts


def _before_loops(script: Script, flat: Flat) -> list[ast.stmt]:
    """Statements before the first loop that uses an optimizer: the loop over batches is in another file."""
    optimizers = {name for name, _ in made_by(script, flat.statements, tuple(OPTIMIZERS))}
    for place, statement in enumerate(flat.statements):
        if isinstance(statement, ast.For | ast.While) and read_names(statement) & optimizers:
            return flat.statements[:place]
    return list(flat.statements)


def _is_backward(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "manual_backward")


Path = list[tuple[list[ast.stmt], int]]


def _path(block: list[ast.stmt], target: ast.AST) -> Path:
    """The blocks around a node, outermost first, each with the place of the statement that leads to it."""
    for place, statement in enumerate(block):
        if not any(node is target for node in ast.walk(statement)):
            continue
        for name in ("body", "orelse"):
            inner = getattr(statement, name, None)
            if isinstance(inner, list) and (found := _path(inner, target)):
                return [(block, place), *found]
        return [(block, place)]
    return []


def _split(script: Script, flat: Flat, parts: Parts, path: Path) -> None:
    """Divide the statements on the way to the backward pass into those before the loop over batches and its step."""
    way = [block[place] for block, place in path]
    loops = [level for level, statement in enumerate(way) if isinstance(statement, ast.For | ast.While)]
    fors = {level: statement for level, statement in enumerate(way) if isinstance(statement, ast.For)}
    over_data = {level: loop for level, loop in fors.items() if not _is_count(loop.iter)}
    of_loaders = [level for level, loop in over_data.items() if loader_name(loop.iter) in loaders(script, flat)]
    level = of_loaders[-1] if of_loaders else max(over_data, default=None)
    if level is not None:
        parts.loop = over_data[level]
    elif loops:
        level = loops[-1]
        if len(loops) > 1 and level in fors:
            parts.accumulation = _count(fors[level].iter)
            level = loops[-2]
    else:
        level = len(path) - 1
    for depth, (block, place) in enumerate(path):
        if depth <= level:
            parts.prelude += block[:place]
        else:
            parts.step += block[:place] if depth < len(path) - 1 else block[: place + 1]
    if path and level is not None:
        parts.inner = [way[level]]
        parts.accumulation = parts.accumulation or _every(parts.inner)


def _is_count(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in ("range", "trange", "count")


def _count(node: ast.expr) -> ast.expr | None:
    return node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else None


def _of_accelerator(everything: list[ast.AST]) -> ast.expr | None:
    """Accelerator(gradient_accumulation_steps=N), which `accelerator.accumulate()` follows."""
    calls = [node for node in everything if isinstance(node, ast.Call) and last_name(node.func) == "Accelerator"]
    return next((found for one in calls if (found := keyword(one, "gradient_accumulation_steps")) is not None), None)


def _every(statements: list[ast.stmt]) -> ast.expr | None:
    """N of `if (i + 1) % N == 0:` around an optimizer's step."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.If) and any(_is_update(one) for inner in node.body for one in ast.walk(inner)):
                for part in ast.walk(node.test):
                    if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                        return part.right
    return None


def _is_update(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"):
        return False
    owner = last_name(node.func.value).lower()
    return "opt" in owner or "scaler" in owner
