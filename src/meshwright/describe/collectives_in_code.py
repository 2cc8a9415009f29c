"""Find calls of torch.distributed's collectives in a model's and a loss's code, by reading their instructions.

Without a process group they cannot run, and authors often skip them then, so a pass does not show them.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from meshwright.describe.code_lines import is_authors
from meshwright.facts.model import CollectiveFacts

SENDING = (
    *("all_reduce", "all_gather", "reduce", "reduce_scatter", "broadcast", "gather", "scatter", "all_to_all"),
    *("send", "recv", "isend", "irecv", "barrier"),
)
"""What the names of functions of torch.distributed that communicate start with."""


def find_collectives(model: nn.Module, loss: Callable[..., Any]) -> tuple[CollectiveFacts, ...]:
    """Collectives that the forward of a module, a function that it names, or the loss may call."""
    classes: dict[type[nn.Module], str] = {}
    for name, module in model.named_modules():
        classes.setdefault(type(module), name)
    seen: set[CodeType] = set()
    found: list[CollectiveFacts] = []
    for kind, name in classes.items():
        found += _in_function(kind.forward, kind, name, seen)
    return (*found, *_in_function(loss, None, None, seen))


def _in_function(
    function: Any, owner: type | None, module: str | None, seen: set[CodeType]
) -> Iterator[CollectiveFacts]:
    """Search a function, the functions that are defined in it, and those of the author's that it names."""
    while isinstance(function, partial):
        function = function.func
    plain = inspect.unwrap(function)
    plain = plain if hasattr(plain, "__code__") else getattr(plain, "__func__", type(plain).__call__)
    code = getattr(plain, "__code__", None)
    if code is None or code in seen or not is_authors(code.co_filename):
        return
    seen.add(code)
    for target, line in _named_objects(plain, code, owner):
        if name := _sends(target):
            yield CollectiveFacts(name=name, module=module, file=code.co_filename, line=line)
        elif isinstance(target, FunctionType):
            yield from _in_function(target, owner, module, seen)


def _named_objects(function: Any, code: CodeType, owner: type | None) -> Iterator[tuple[Any, int]]:
    """The functions that code loads by name, with their lines; also methods of `owner`."""
    held = _cells(function)
    line, loaded = code.co_firstlineno, None
    for step in dis.get_instructions(code):
        line = (step.positions.lineno if step.positions else None) or line
        name = step.argval
        match step.opname:
            case "LOAD_GLOBAL" | "LOAD_NAME":
                loaded = function.__globals__.get(name, getattr(builtins, name, None))
            case "LOAD_DEREF" | "LOAD_FAST" | "LOAD_FAST_BORROW":
                loaded = held.get(name)
            case "IMPORT_NAME":
                loaded = sys.modules.get(name)
            case "LOAD_ATTR" | "LOAD_METHOD" | "IMPORT_FROM":
                method = inspect.getattr_static(owner, name, None) if owner is not None else None
                loaded = getattr(loaded, name, None) if isinstance(loaded, ModuleType) else method
            case "STORE_FAST" | "STORE_DEREF":
                held[name] = loaded
            case _:
                continue
        if callable(loaded):
            yield loaded, line
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _named_objects(function, inner, owner)


def _cells(function: Any) -> dict[str, Any]:
    """The variables of enclosing functions that a function reads."""
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return held


def _sends(target: Any) -> str:
    """The name of a communicating function of torch.distributed; empty for anything else."""
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    is_sending = any(name == word or name.startswith(f"{word}_") for word in SENDING)
    return name if module.startswith("torch.distributed") and is_sending else ""
