"""Write the functions that build a job's optimizer and learning-rate schedule."""

from __future__ import annotations

import ast
import copy
from typing import Any

from meshwright.adopt.draft import Draft, function, raising
from meshwright.adopt.script import argument, is_true, last_name
from meshwright.adopt.slices import read_names, stored_names

OF_ZERO = ("optimizer_class", "process_group", "parameters_as_bucket_view", "overlap_with_ddp")
"""Options of ZeroRedundancyOptimizer that are not the optimizer's."""


class _Parameters(ast.NodeTransformer):
    """Writes `model.parameters()` as what the job's optimizer gets."""

    def __init__(self, model: str) -> None:
        self._model = model

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        reads = ("parameters", "named_parameters")
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in reads or node.args:
            return node
        named, text = node.func.attr == "named_parameters", ast.unparse(node.func.value)
        if text == self._model:
            return _expression("params.named()" if named else "params")
        if not text.startswith(f"{self._model}."):
            return node
        prefix = text.removeprefix(f"{self._model}.") + "."
        item = f"(n.removeprefix({prefix!r}), p)" if named else "p"
        return _expression(f"[{item} for n, p in params.named() if n.startswith({prefix!r})]")


class _Lengths(ast.NodeTransformer):
    """Writes `len(loader)` as the steps of an epoch."""

    def __init__(self, loader: str) -> None:
        self._loader = loader

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        is_length = last_name(node.func) == "len" and bool(node.args) and bool(self._loader)
        return _expression("steps_per_epoch()") if is_length and ast.unparse(node.args[0]) == self._loader else node


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def write_optimizer(draft: Draft) -> str:
    model, prelude = draft.parts.model, draft.parts.prelude
    if not draft.parts.optimizers:
        made = draft.parts.made_by_model
        found = "it was not found" if made is None else f"{ast.unparse(made)} is a method of the model"
        how = "build it from `params`, and groups from params.named()"
        draft.leave(1 if made is None else made.lineno, f"optimizer: {found}; {how}.")
        return raising("job_optimizer", "params")
    call = list(draft.parts.optimizers.values())[-1]
    places = draft.collector.slicer.of(read_names(call) - {model}, given=draft.given)
    own = _reading(draft, places, model)
    draft.shared |= set(places) - set(own)
    draft.share({name for one in own for name in read_names(prelude[one])} - draft.stored_in(own))
    draft.share(read_names(call) - draft.stored_in(own))
    body = [_Parameters(model).visit(copy.deepcopy(prelude[one])) for one in own]
    made = _plain(_Parameters(model).visit(copy.deepcopy(call)))
    text = function("job_optimizer", "params", body, f"return {ast.unparse(made)}")
    if model in {name for one in ast.parse(text).body for name in read_names(one)}:
        draft.leave(call.lineno, f"optimizer: it reads {model} itself; take what it needs from `params`.")
    return text


def _reading(draft: Draft, places: list[int], model: str) -> list[int]:
    """The statements that read the model, themselves or through earlier ones."""
    tainted, found = {model}, []
    for one in places:
        statement = draft.parts.prelude[one]
        if read_names(statement) & tainted:
            tainted |= stored_names(statement)
            found.append(one)
    return found


def _plain(call: ast.Call) -> ast.Call:
    """The optimizer itself, without ZeroRedundancyOptimizer and without fused=True, which needs a GPU."""
    if last_name(call.func) == "ZeroRedundancyOptimizer":
        made = argument(call, 1, "optimizer_class")
        rest = [one for one in call.keywords if one.arg not in OF_ZERO]
        call = call if made is None else ast.Call(func=made, args=call.args[:1], keywords=rest)
    call.keywords = [one for one in call.keywords if one.arg != "fused" or not is_true(one.value)]
    return call


def write_schedule(draft: Draft) -> str:
    """The function, or an empty text if the learning rate is constant."""
    call = draft.parts.schedule_call
    if call is None or not draft.parts.optimizers:
        return _write_by_hand(draft)
    if last_name(call.func) == "ReduceLROnPlateau":
        draft.leave(
            call.lineno, "schedule: ReduceLROnPlateau follows a held-out loss; a job gives it the training loss."
        )
    optimizer = next(iter(draft.parts.optimizers))
    prelude = draft.parts.prelude
    places = draft.collector.slicer.of(read_names(call) - {optimizer}, given=draft.given)
    own = [one for one in places if read_names(prelude[one]) & ({draft.parts.loader, optimizer} - {""})]
    draft.shared |= set(places) - set(own)
    draft.share({name for one in own for name in read_names(prelude[one])} - draft.stored_in(own))
    draft.share(read_names(call) - draft.stored_in(own))
    lengths = _Lengths(draft.parts.loader)
    body = [lengths.visit(copy.deepcopy(prelude[one])) for one in own]
    made = ast.unparse(lengths.visit(copy.deepcopy(call)))
    if draft.parts.by_epoch:
        made = f"EveryEpoch({made}, steps_per_epoch())"
    return function("job_schedule", optimizer, body, f"return {made}")


def _write_by_hand(draft: Draft) -> str:
    """A loop that does `group["lr"] = lr`: a schedule, if the rate is a function of the step."""
    nodes = [node for one in draft.flat.statements for node in ast.walk(one)]
    assigned = [one for one in nodes if isinstance(one, ast.Assign)]
    sets = [one for one in assigned if isinstance(one.targets[0], ast.Subscript) and _is_rate(one.targets[0])]
    if not sets:
        return ""
    rate = ast.unparse(sets[0].value)
    sources = [sets[0].value, *(one.value for one in assigned if ast.unparse(one.targets[0]) == rate)]
    calls = [node for one in sources for node in ast.walk(one) if isinstance(node, ast.Call)]
    calls = [one for one in calls if last_name(one.func) in draft.script.functions]
    if not calls or len(calls[0].args) != 1 or calls[0].keywords:
        draft.leave(sets[0].lineno, "schedule: the loop sets the learning rate itself; give one that steps by itself.")
        return ""
    name = ast.unparse(calls[0].func)
    draft.share({name})
    draft.note(f"line {sets[0].lineno}: the learning rate is {name}(step), with steps counted from 0.")
    body = ast.parse('base = optimizer.param_groups[0]["lr"]').body
    made = f"torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {name}(step) / base)"
    return function("job_schedule", "optimizer", body, f"return {made}")


def _is_rate(node: ast.Subscript) -> bool:
    return isinstance(node.slice, ast.Constant) and node.slice.value == "lr"
