"""Mistakes in the step: backward, accumulation, clipping, and what is kept from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from meshwright.adopt.finding import ADVICE, Finding
from meshwright.adopt.kind import Kind, loss_of
from meshwright.adopt.script import Script, called_on, keyword, last_name, names_in

CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def check(script: Script, kind: Kind) -> Iterator[Finding]:
    if not kind.backward:
        return
    yield from _no_zero_grad(script, kind)
    yield from _foreign_backward(script, kind)
    yield from _accumulation(script, kind)
    yield from _mean_of_means(script, kind)
    yield from _local_norm(script, kind)
    yield from _kept_graph(script, kind)
    yield from _summed_gradients(script)
    yield from _eval_mode(script, kind)


def updates(script: Script) -> list[ast.Call]:
    """Calls that update weights: `optimizer.step()`, `scaler.step(optimizer)`."""
    found = []
    for call in script.methods("step"):
        owner = last_name(called_on(call)).lower()
        if any(part in owner for part in ("opt", "scaler", "engine")) or owner.endswith("optim"):
            found.append(call)
    return found


def _no_zero_grad(script: Script, kind: Kind) -> Iterator[Finding]:
    steps = updates(script)
    cleared = script.methods("zero_grad") or any(target.endswith(".grad") for target in script.assigned)
    cleared = cleared or any(last_name(called_on(call)) == "grad" for call in script.methods("zero_", "detach_"))
    if "dist_autograd" in script.text or "distributed.autograd" in script.text:
        return  # gradients live in a context of each step
    if (
        steps
        and not cleared
        and "deepspeed" not in kind.libraries
        and any(script.loops_of(call) for call in kind.backward)
    ):
        yield Finding(
            name="no-zero-grad",
            line=steps[0].lineno,
            message="Gradients are never cleared, so each step adds to those of all steps before. Call "
            "optimizer.zero_grad() once per step.",
        )


def _foreign_backward(script: Script, kind: Kind) -> Iterator[Finding]:
    """`loss.backward()` where a library must do it."""
    calls = {
        "accelerate": "accelerator.backward(loss)",
        "fabric": "fabric.backward(loss)",
        "deepspeed": "engine.backward(loss)",
    }
    if not kind.library:
        return
    for call in kind.backward:
        if not call.args and "loss" in last_name(called_on(call)).lower():
            right = calls[kind.library]
            yield Finding(
                name="plain-backward",
                line=call.lineno,
                message=f"loss.backward() goes around the library that scales the loss and accumulates. Write {right}.",
            )


def _accumulation(script: Script, kind: Kind) -> Iterator[Finding]:
    if "deepspeed" in kind.libraries or script.methods("accumulate"):
        return
    for step in updates(script):
        count = _every(script, step)
        loop = next(iter(script.loops_of(step)), None)
        inside = [call for call in kind.backward if loop in script.loops_of(call)]
        if count is None or not inside or any(_shares_if(script, step, call) for call in inside):
            continue
        if not _is_divided(script, loop, count):
            yield Finding(
                name="accumulation-not-divided",
                line=inside[0].lineno,
                message=f"Gradients of {count} batches are summed, not averaged: the step is {count} times as large as "
                f"with one batch of all their samples. Divide the loss by {count} before backward.",
            )
            return


def _every(script: Script, step: ast.Call) -> str | None:
    """N of `if (i + 1) % N == 0:` around a step."""
    for one in script.above(step):
        if isinstance(one, ast.For | ast.While | ast.FunctionDef):
            return None
        if isinstance(one, ast.If):
            for part in ast.walk(one.test):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                    return ast.unparse(part.right)
    return None


def _shares_if(script: Script, step: ast.Call, backward: ast.Call) -> bool:
    tests = [one for one in script.above(step) if isinstance(one, ast.If)]
    return any(one in tests for one in script.above(backward))


def _is_divided(script: Script, loop: ast.AST | None, count: str) -> bool:
    scope = script.function_of(loop) if loop is not None else script.tree
    for one in ast.walk(scope):
        divides = (isinstance(one, ast.BinOp | ast.AugAssign)) and isinstance(one.op, ast.Div | ast.Mult)
        divisor = one.right if isinstance(one, ast.BinOp) else one.value if isinstance(one, ast.AugAssign) else None
        if divides and divisor is not None and ast.unparse(divisor) == count:
            return True
        if divides and "loss" in ast.unparse(one).lower():
            return True
        if (
            isinstance(one, ast.Call)
            and last_name(one.func) in {"div", "div_", "mul", "mul_"}
            and "loss" in ast.unparse(one).lower()
        ):
            return True
    return False


def _mean_of_means(script: Script, kind: Kind) -> Iterator[Finding]:
    if not kind.by_hand and not any(_every(script, step) for step in updates(script)):
        return
    for call in script.calls:
        ignored = keyword(call, "ignore_index")
        reduction = keyword(call, "reduction")
        summed = isinstance(reduction, ast.Constant) and reduction.value in {"sum", "none"}
        if ignored is not None and not summed and "ross" in ast.unparse(call.func):
            yield Finding(
                name="mean-of-means",
                line=call.lineno,
                grade=ADVICE,
                message="The loss is a mean over the targets that are not ignored, and those means are averaged over "
                "ranks or micro-batches: targets in batches with few of them count more. Sum the loss, and divide by "
                "the number of targets over all of them.",
            )
            return


def _local_norm(script: Script, kind: Kind) -> Iterator[Finding]:
    own = {
        "fsdp": "model.clip_grad_norm_(max_norm)",
        "accelerate": "accelerator.clip_grad_norm_(...)",
        "fabric": "fabric.clip_gradients(...)",
        "deepspeed": '"gradient_clipping" in its config',
    }
    wants = next((own[one] for one in ("deepspeed", "accelerate", "fabric", "fsdp") if one in kind.libraries), None)
    for call in script.calls_of(*CLIPS):
        is_torch = script.dotted(call.func).startswith("torch.nn.utils") or isinstance(call.func, ast.Name)
        if wants is not None and is_torch:
            yield Finding(
                name="local-norm",
                line=call.lineno,
                message="torch.nn.utils clips by the norm of what this rank holds: ranks with other shards scale by "
                f"other factors, or clip scaled gradients. Use {wants}.",
            )


def _kept_graph(script: Script, kind: Kind) -> Iterator[Finding]:
    """`total += loss` keeps every step's graph alive."""
    losses = {
        ast.unparse(loss)
        for call in kind.backward
        if (loss := loss_of(call)) is not None and isinstance(loss, ast.Name)
    }
    for node in ast.walk(script.tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and ast.unparse(node.value) in losses:
            target = ast.unparse(node.target)
            function = script.function_of(node)
            shares = any(
                script.function_of(call) is function and loop in script.loops_of(call)
                for call in kind.backward
                for loop in script.loops_of(node)[:1]
            )
            before = any(
                ast.unparse(node.value) == ast.unparse(one.targets[0]) and "item" in ast.unparse(one.value)
                for one in ast.walk(function)
                if isinstance(one, ast.Assign)
            )
            if target not in losses and shares and not before and not _is_wrapped(script, node):
                yield Finding(
                    name="kept-graph",
                    line=node.lineno,
                    message=f"{target} += {ast.unparse(node.value)} keeps the graph of every step in memory. Add "
                    f"{ast.unparse(node.value)}.item() or .detach().",
                )


def _is_wrapped(script: Script, node: ast.AST) -> bool:
    return any(isinstance(one, ast.With) and "no_grad" in ast.unparse(one.items[0]) for one in script.above(node))


def _summed_gradients(script: Script) -> Iterator[Finding]:
    """Gradients all-reduced by hand, summed and never divided."""
    for call in script.calls_of("all_reduce"):
        if not call.args or ".grad" not in ast.unparse(call.args[0]) or "AVG" in ast.unparse(call):
            continue
        body = script.function_of(call)
        divided = any(
            isinstance(one, ast.BinOp | ast.AugAssign) and isinstance(one.op, ast.Div) for one in ast.walk(body)
        )
        divided |= any(
            isinstance(one, ast.Call) and last_name(one.func) in {"div_", "div", "mul_"} for one in ast.walk(body)
        )
        if not divided:
            yield Finding(
                name="summed-gradients",
                line=call.lineno,
                message="Gradients are summed over ranks and not divided by their number, so the step grows with the "
                "ranks. Divide by the world size, or use DDP.",
            )


def _eval_mode(script: Script, kind: Kind) -> Iterator[Finding]:
    """The model is put into eval mode inside the training loop and never back."""
    if any(
        not call.args or isinstance(call.args[0], ast.Constant)
        for call in script.methods("train")
        if "model" in ast.unparse(call.func).lower() or "net" in ast.unparse(call.func).lower()
    ):
        return
    evals = {call for call in script.methods("eval") if not call.args and "model" in ast.unparse(call.func).lower()}
    training = set(kind.backward)
    for loop in (node for node in ast.walk(script.tree) if isinstance(node, ast.For | ast.While)):
        if (
            script.reaches(loop, training)
            and script.reaches(loop, evals)
            and not names_in(loop) & {"teacher", "discriminator"}
        ):
            line = min(call.lineno for call in evals)
            yield Finding(
                name="stays-in-eval-mode",
                line=line,
                message="The model is put into eval mode and never back: later epochs train without dropout and with "
                "frozen BatchNorm statistics. Call model.train() at the start of each epoch.",
            )
            return
