"""Mistakes in saving and loading: from every rank, from one where all are needed, without a barrier, with a prefix."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from meshwright.adopt.finding import ADVICE, Finding
from meshwright.adopt.kind import Kind
from meshwright.adopt.script import Script, argument, called_on, mentions_rank

ALL_RANKS = {
    "accelerate": ("save_state", "accelerator.save_state()"),
    "fabric": ("save", "fabric.save()"),
    "deepspeed": ("save_checkpoint", "engine.save_checkpoint()"),
}
"""Saving that every rank must join, by library."""


def check(script: Script, kind: Kind) -> Iterator[Finding]:
    is_spread = kind.by_hand or bool(kind.library)
    if not is_spread:
        return
    yield from _every_rank(script)
    yield from _one_rank(script, kind)
    yield from _no_barrier(script)
    yield from _prefixed(script, kind)


def _saves(script: Script) -> list[ast.Call]:
    return [call for call in script.calls if script.dotted(call.func) == "torch.save"]


def _every_rank(script: Script) -> Iterator[Finding]:
    for call in _saves(script):
        path = argument(call, 1, "f")
        sources = [path] if path is not None else []
        sources += (
            [one.value for one in script.assigned.get(ast.unparse(path), []) if one.value] if path is not None else []
        )
        if not script.is_guarded(call) and not any(mentions_rank(one) for one in sources):
            yield Finding(
                name="saved-by-every-rank",
                line=call.lineno,
                message="Every rank writes this file at the same time. Save on rank 0 only.",
            )


def _one_rank(script: Script, kind: Kind) -> Iterator[Finding]:
    name, shown = ALL_RANKS.get(kind.library, ("", ""))
    for call in script.methods(name) if name else []:
        owner = ast.unparse(called_on(call))
        if script.is_guarded(call) and any(part in owner for part in ("accelerator", "fabric", "engine", "model")):
            yield Finding(
                name="saved-by-one-rank",
                line=call.lineno,
                message=f"{shown} gathers from all ranks, and only some of them get here: the run hangs. Call it on "
                "every rank.",
            )
    if "fsdp" not in kind.libraries and "fsdp2" not in kind.libraries:
        return
    for call in script.methods("state_dict"):
        owner = ast.unparse(called_on(call))
        if script.is_guarded(call) and "model" in owner.lower() and "module" not in owner:
            yield Finding(
                name="saved-by-one-rank",
                line=call.lineno,
                message="state_dict() of an FSDP model gathers from all ranks, and only some of them get here: the run "
                "hangs. Call it on every rank, and save the result on rank 0.",
            )


def _no_barrier(script: Script) -> Iterator[Finding]:
    """All ranks load what one has just saved."""
    loads = [call for call in script.calls if script.dotted(call.func) == "torch.load" and call.args]
    waits = [call.lineno for call in script.calls_of("barrier", "wait_for_everyone")]
    for save in _saves(script):
        path = argument(save, 1, "f")
        for load in loads:
            same = path is not None and ast.unparse(load.args[0]) == ast.unparse(path)
            same = same and script.function_of(load) is script.function_of(save)
            between = any(save.lineno < line <= load.lineno for line in waits)
            if (
                same
                and save.lineno < load.lineno
                and script.is_guarded(save)
                and not script.is_guarded(load)
                and not between
            ):
                yield Finding(
                    name="no-barrier",
                    line=load.lineno,
                    message=f"Ranks load the file that rank 0 writes in line {save.lineno}, perhaps before it is "
                    "complete. Call torch.distributed.barrier() in between.",
                )


def _prefixed(script: Script, kind: Kind) -> Iterator[Finding]:
    """A wrapped model's state dict, whose names start with "module."."""
    if kind.libraries & {"fsdp", "fsdp2"} or "ddp" not in kind.libraries:
        return
    wrapped = {target for call in script.calls_of("DistributedDataParallel") for target in script.targets_of(call)}
    loaded = {ast.unparse(called_on(call)): call.lineno for call in script.methods("load_state_dict")}
    after = {target: max(call.lineno for call in script.calls_of("DistributedDataParallel")) for target in wrapped}
    for call in script.methods("state_dict"):
        owner = ast.unparse(called_on(call))
        used_wrapped = loaded.get(owner, 0) > after.get(owner, 0)
        if owner in wrapped and not used_wrapped and _is_saved(script, call):
            yield Finding(
                name="prefixed-names",
                line=call.lineno,
                grade=ADVICE,
                message=f'The names in {owner}.state_dict() start with "module.", and a plain model does not load '
                "them. "
                f"Save {owner}.module.state_dict().",
            )


def _is_saved(script: Script, call: ast.Call) -> bool:
    """Whether the result is saved to a file in the same function."""
    body = script.function_of(call)
    return any(script.function_of(save) is body or body in script.above(save) for save in _saves(script))
