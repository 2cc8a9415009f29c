"""Write a job's `inputs` and `loss` from the statements of a script's step."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from typing import Any

from meshwright.adopt.draft import Draft, raising
from meshwright.adopt.parts import Parts
from meshwright.adopt.script import last_name
from meshwright.adopt.slices import Slicer, read_names, stored_names
from meshwright.adopt.weigh import divided, divides, weigh

OUTPUT = "output"


@dataclass
class StepCode:
    """Two functions as text, and the names that they need from elsewhere."""

    inputs: str
    loss: str
    needs: set[str] = field(default_factory=set)
    prepared: list[ast.stmt] = field(default_factory=list)
    """Statements that make the model's inputs from a batch."""


class _Replace(ast.NodeTransformer):
    """Puts the name of the output in place of the call of the model."""

    def __init__(self, target: ast.AST) -> None:
        self._target = target

    def visit(self, node: ast.AST) -> Any:
        return ast.Name(id=OUTPUT, ctx=ast.Load()) if node is self._target else self.generic_visit(node)


def write_step(draft: Draft) -> StepCode:
    """The two functions; those that could not be written raise, and are left to the user."""
    return _write(draft) or StepCode(inputs=raising("job_inputs", "batch"), loss=raising("job_loss", "output, batch"))


def _write(draft: Draft) -> StepCode | None:
    parts = draft.parts
    nodes = [(place, node) for place, one in enumerate(parts.step) for node in ast.walk(one)]
    found = [(place, node) for place, node in nodes if isinstance(node, ast.Call) and _calls(node, parts.model)]
    if parts.loss is None and parts.loader_call is not None and draft.kind.trainer:
        return _of_trainer(draft)
    if parts.loss is None:
        where = "is in another file" if draft.kind.elsewhere else "was not found"
        draft.leave(1, f"inputs and loss: the loop {where}; write both functions.")
        return None
    if len(found) != 1:
        how = f"{len(found)} times" if found else "in a way that was not found"
        advice = "Write both functions, or keep the loop with mw.parallelize"
        draft.leave(draft.line, f"inputs and loss: the step calls the model {how}, and a job calls it once. {advice}.")
        return None
    place, call = found[0]
    batch, arguments = _batch(parts, call), _arguments(call)
    if batch is None:
        draft.leave(draft.line, "inputs and loss: what a batch is was not found; write both functions.")
        return None
    if arguments is None:
        draft.leave(call.lineno, "inputs: the model takes positional and keyword arguments; return one tuple or dict.")
        return None
    wanted, returned = arguments
    before = parts.step[:place]
    if parts.loop is None:  # statements that draw the batch are the data's, which are left to the user
        before = [one for one in before if not stored_names(one) & _targets(batch) or read_names(one) & _targets(batch)]
    prepared = [before[one] for one in Slicer(before).of(wanted)]
    inputs = _function("job_inputs", "batch", [_unpack(batch, wanted, prepared), *prepared], f"return {returned}")
    loss = _loss(draft, place, call, batch)
    needs = (_free(inputs) | _free(loss)) - {"batch", OUTPUT}
    carried = needs & (stored_names(parts.inner[0]) if parts.inner else set())
    for name in sorted(carried - _targets(batch)):
        draft.leave(draft.line, f"{name} is carried from one batch to the next; a job's batches are independent.")
    return StepCode(inputs=inputs, loss=loss, needs=needs, prepared=prepared)


def _of_trainer(draft: Draft) -> StepCode:
    """The step of transformers' Trainer: the batch as keywords, and the loss that the model returns."""
    weight = weigh(draft.script, draft.parts, ast.Constant(None), in_output=True)
    if weight.note:
        draft.note(weight.note)
    draft.note("The Trainer drops columns that the model does not take; drop them in the data or in `collate`.")
    ending = f"weight = {weight.text}\n    return output.loss * weight, weight"
    loss = _function("job_loss", "output, batch", [], ending)
    return StepCode(inputs=_function("job_inputs", "batch", [], "return dict(batch)"), loss=loss, needs=set())


def _calls(node: ast.Call, model: str) -> bool:
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "forward":
        function = function.value
    return isinstance(function, ast.Name) and function.id == model


def _batch(parts: Parts, call: ast.Call) -> ast.expr | None:
    """What the loop over batches calls a batch; without a loop, the arguments of the model."""
    if parts.loop is None:
        names = [one for one in call.args if isinstance(one, ast.Name)]
        return (
            ast.Tuple(elts=[ast.Name(id=one.id, ctx=ast.Store()) for one in names], ctx=ast.Store()) if names else None
        )
    target, iterated = parts.loop.target, parts.loop.iter
    if isinstance(iterated, ast.Call) and last_name(iterated.func) == "enumerate":
        return target.elts[1] if isinstance(target, ast.Tuple) and len(target.elts) == 2 else None
    if isinstance(iterated, ast.Call) and last_name(iterated.func) == "zip":
        return None
    return target


def _arguments(call: ast.Call) -> tuple[set[str], str] | None:
    """The names that the model's arguments read, and the arguments as a tuple or a dict."""
    wanted = {name for one in [*call.args, *(word.value for word in call.keywords)] for name in read_names(one)}
    if call.keywords and call.args:
        return None
    if not call.keywords:
        values = ", ".join(ast.unparse(one) for one in call.args)
        return wanted, f"({values},)" if len(call.args) == 1 else f"({values})"
    if len(call.keywords) == 1 and call.keywords[0].arg is None:
        return wanted, f"dict({ast.unparse(call.keywords[0].value)})"
    pairs = ", ".join(
        f'"{one.arg}": {ast.unparse(one.value)}' if one.arg else f"**{ast.unparse(one.value)}" for one in call.keywords
    )
    return wanted, f"{{{pairs}}}"


def _unpack(batch: ast.expr, wanted: set[str], statements: list[ast.stmt]) -> ast.stmt | None:
    """`x, y = batch`, unless the loop calls it batch as well, or needs none of it."""
    needed = wanted | {name for one in statements for name in read_names(one)}
    if ast.unparse(batch) == "batch" or not needed & _targets(batch):
        return None
    return ast.Assign(targets=[batch], value=ast.Name(id="batch", ctx=ast.Load()), lineno=1)


def _targets(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _loss(draft: Draft, place: int, call: ast.Call, batch: ast.expr) -> str:
    """The function from the model's output to the loss's sum and weight."""
    parts, script = draft.parts, draft.script
    replaced = []
    for number, statement in enumerate(parts.step[:-1]):
        one = _Replace(call).visit(_copied(statement, call)) if number == place else statement
        replaced.append(one)
    assert parts.loss is not None
    final: ast.expr = _Replace(call).visit(_copied(parts.loss, call))
    final = divided(final, parts.accumulation) or final
    if isinstance(final, ast.Name):
        replaced = [one for one in replaced if not divides(script, one, final.id, parts.accumulation)]
    body = [replaced[one] for one in Slicer(replaced).of(read_names(final), given={OUTPUT})]
    # A division inside the last assignment: loss = criterion(output, y) / accumulation
    if (
        body
        and isinstance(body[-1], ast.Assign)
        and (undivided := divided(body[-1].value, parts.accumulation)) is not None
    ):
        body[-1] = ast.Assign(targets=body[-1].targets, value=undivided, lineno=1)
    last = body[-1].value if body and isinstance(body[-1], ast.Assign) and isinstance(final, ast.Name) else final
    in_output = _is_of_output(last, body, final)
    weight = weigh(script, parts, last, in_output=in_output)
    if weight.note:
        draft.note(f"line {draft.line}: {weight.note}")
    shown = [one for one in body if not _is_same(one)]
    text = ast.unparse(final)
    ending = f"weight = {weight.text}\n    return {text}{'' if weight.is_sum else ' * weight'}, weight"
    reads = read_names(final) | read_names(ast.parse(weight.text))
    return _function("job_loss", "output, batch", [_unpack(batch, reads, body), *shown], ending)


def _copied(node: Any, call: ast.Call) -> Any:
    """A copy in which the call is still the same object."""
    return copy.deepcopy(node, {id(call): call})


def _is_of_output(last: ast.expr, body: list[ast.stmt], final: ast.expr) -> bool:
    """Whether the loss is a part of the model's output, as Hugging Face's models return it."""
    aliases = {OUTPUT} | {
        ast.unparse(one.targets[0]) for one in body if isinstance(one, ast.Assign) and ast.unparse(one.value) == OUTPUT
    }
    if isinstance(last, ast.Name) and last.id == OUTPUT:
        return True
    if isinstance(last, ast.Attribute | ast.Subscript):
        return ast.unparse(last.value) in aliases
    return isinstance(last, ast.Name) and last.id in aliases


def _is_same(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == ast.unparse(statement.value)


def _function(name: str, parameters: str, body: list[ast.stmt | None], ending: str) -> str:
    lines = [
        line for one in body if one is not None for line in ast.unparse(ast.fix_missing_locations(one)).splitlines()
    ]
    return "\n".join([f"def {name}({parameters}):", *(f"    {line}" for line in lines), f"    {ending}"])


def _free(text: str) -> set[str]:
    return {name for one in ast.parse(text).body for name in read_names(one)}
