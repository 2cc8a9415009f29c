"""Find the parts of a training in a straight script: model, optimizer, schedule, data, and the step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.adopt.check_data import HELD_OUT
from meshwright.adopt.flatten import Flat
from meshwright.adopt.kind import OPTIMIZERS, loss_of
from meshwright.adopt.script import Script, argument, keyword, last_name
from meshwright.adopt.slices import read_names, stored_names

LOADERS = ("DataLoader", "StatefulDataLoader")
CLIPS = ("clip_grad_norm_", "clip_gradients")


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


def find_parts(script: Script, flat: Flat) -> Parts:
    parts = Parts()
    everything = [node for statement in flat.statements for node in ast.walk(statement)]
    parts.backward = [node for node in everything if _is_backward(node)]  # type: ignore[misc]
    path = _path(flat.statements, parts.backward[0]) if parts.backward else []
    if path:
        _split(script, flat, parts, path)
    else:
        parts.prelude = _before_loops(script, flat)
    _find_optimizer(script, flat, parts)
    _find_schedule(script, flat, parts)
    if parts.loop is not None:
        parts.loader = _loader_name(parts.loop.iter)
    elif not path:
        parts.loader = next((name for name in _made_in_order(script, parts) if not HELD_OUT.search(name)), "")
    parts.loader = _loader_behind(script, flat, parts.loader)
    parts.loader_call = _loader_call(script, parts)
    if parts.backward:
        parts.loss = loss_of(parts.backward[0])
    _find_clip(parts, everything)
    parts.accumulation = parts.accumulation or _of_accelerator(everything)
    return parts


def _before_loops(script: Script, flat: Flat) -> list[ast.stmt]:
    """Statements before the first loop that uses an optimizer: the loop over batches is in another file."""
    optimizers = {name for name, _ in _made_by(script, flat.statements, tuple(OPTIMIZERS))}
    for place, statement in enumerate(flat.statements):
        if isinstance(statement, ast.For | ast.While) and read_names(statement) & optimizers:
            return flat.statements[:place]
    return list(flat.statements)


def _made_in_order(script: Script, parts: Parts) -> list[str]:
    return [name for name, _ in _made_by(script, parts.prelude, LOADERS)]


def _is_backward(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("backward", "manual_backward")
    )


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
    loops = [level for level, (block, place) in enumerate(path) if isinstance(block[place], ast.For | ast.While)]
    fors = [level for level in loops if isinstance(_at(path, level), ast.For) and not _is_count(_at(path, level).iter)]  # type: ignore[attr-defined]
    of_loaders = [level for level in fors if _loader_name(_at(path, level).iter) in _loaders(script, flat)]  # type: ignore[attr-defined]
    level = of_loaders[-1] if of_loaders else fors[-1] if fors else None
    if level is not None:
        parts.loop = _at(path, level)  # type: ignore[assignment]
    elif loops:
        counted = [one for one in loops if isinstance(_at(path, one), ast.For)]
        level = loops[-2] if len(loops) > 1 and counted and counted[-1] == loops[-1] else loops[-1]
        if level != loops[-1]:
            parts.accumulation = _count(_at(path, loops[-1]).iter)  # type: ignore[attr-defined]
    else:
        level = len(path) - 1
    for depth, (block, place) in enumerate(path):
        if depth <= level:
            parts.prelude += block[:place]
        else:
            parts.step += block[:place] if depth < len(path) - 1 else block[: place + 1]
    if path and level is not None:
        parts.inner = [_at(path, level)]
        parts.accumulation = parts.accumulation or _every(parts.inner)


def _at(path: Path, level: int) -> ast.stmt:
    block, place = path[level]
    return block[place]


def _is_count(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in ("range", "trange", "count")


def _count(node: ast.expr) -> ast.expr | None:
    return node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else None


def _loader_name(node: ast.expr) -> str:
    """The loader of `for batch in loader`, through enumerate, islice, zip and the like."""
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _loaders(script: Script, flat: Flat) -> set[str]:
    return {name for name, _ in _made_by(script, flat.statements, LOADERS)}


def _made_by(script: Script, statements: list[ast.stmt], classes: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    """Names with the calls of these classes that make them."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if script.dotted(node.value.func).rpartition(".")[2] in classes and isinstance(target, ast.Name):
                    yield target.id, node.value


def _loader_behind(script: Script, flat: Flat, name: str) -> str:
    """The loader of `active = train_loader` and `active = skip_first_batches(train_loader, n)`."""
    made = _loaders(script, flat)
    nodes = [node for statement in flat.statements for node in ast.walk(statement)]
    sources = [one.value for one in nodes if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name]
    behind = [] if name in made else [found for one in sources if (found := _loader_name(one)) in made]
    return behind[0] if behind else name


def _find_optimizer(script: Script, flat: Flat, parts: Parts) -> None:
    parts.optimizers = dict(_made_by(script, parts.prelude, (*OPTIMIZERS, "ZeroRedundancyOptimizer")))
    if not parts.optimizers:
        parts.made_by_model = next((one for one in map(_made_by_method, parts.prelude) if one is not None), None)
        parts.model = ast.unparse(parts.made_by_model.func.value) if parts.made_by_model is not None else ""  # type: ignore[attr-defined]
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


def _find_schedule(script: Script, flat: Flat, parts: Parts) -> None:
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


def _loader_call(script: Script, parts: Parts) -> ast.Call | None:
    made = dict(_made_by(script, parts.prelude, LOADERS))
    if parts.loader in made:
        return made[parts.loader]
    iterated = parts.loop.iter if parts.loop is not None else None
    calls = (
        []
        if iterated is None
        else [one for one in ast.walk(iterated) if isinstance(one, ast.Call) and last_name(one.func) in LOADERS]
    )
    return calls[0] if calls else None


def _find_clip(parts: Parts, everything: list[ast.AST]) -> None:
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
