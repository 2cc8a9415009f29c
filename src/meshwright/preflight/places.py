"""Find the line of the author's code that makes, or changes, a module's attribute."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from meshwright.describe.code_lines import is_authors

_REGISTER = ("register_buffer", "register_parameter", "register_module", "add_module")


@dataclass(frozen=True)
class CodePlace:
    """A line of a file; line 0 if it is not known."""

    file: str = ""
    line: int = 0


NOWHERE = CodePlace()


def place_of_function(function: Any) -> CodePlace:
    """Where a function, a class or the call operator of an object is defined."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    if not hasattr(function, "__code__") and not inspect.isclass(function):
        function = type(function).__call__
    if inspect.isclass(function):
        return _place_of_class(function)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return CodePlace(code.co_filename, code.co_firstlineno) if code else NOWHERE


def place_of_module(model: nn.Module, name: str) -> CodePlace:
    """Where the forward of a module is defined if it is the author's, else where the module is made."""
    kind = type(model.get_submodule(name))
    if is_authors(inspect.getfile(kind)):
        return place_of_function(kind.forward)
    return place_made(model, name)


def place_made(model: nn.Module, name: str) -> CodePlace:
    """Where a module, parameter or buffer is made: the innermost assignment in the code of an author's class."""
    return _find(model, name, _made)


def place_changed(model: nn.Module, name: str) -> CodePlace:
    """Where an attribute is changed outside of `__init__`; where it is made if no such line is found."""
    found = _find(model, name.partition("[")[0], _changed)
    return found if found.line else place_made(model, name.partition("[")[0])


def _find(model: nn.Module, name: str, search: Callable[[ast.ClassDef, str], int]) -> CodePlace:
    """Search the classes of the modules around a name, innermost first."""
    while name:
        parent, _, attribute = name.rpartition(".")
        try:
            owner = type(model.get_submodule(parent))
        except AttributeError:
            owner = nn.Module
        for kind in owner.__mro__:
            file, tree = _source(kind)
            if tree is not None and (line := search(tree, attribute)):
                return CodePlace(file, line)
        name = parent
    return NOWHERE


@lru_cache(maxsize=256)
def _source(kind: type) -> tuple[str, ast.ClassDef | None]:
    """The file and the syntax tree of an author's class, with the file's line numbers."""
    try:
        file = inspect.getfile(kind)
        if not is_authors(file):
            return file, None
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return "", None
    ast.increment_lineno(tree, first - 1)
    found = tree.body[0]
    return file, found if isinstance(found, ast.ClassDef) else None


def _place_of_class(kind: type) -> CodePlace:
    file, tree = _source(kind)
    return CodePlace(file, tree.lineno) if tree is not None else NOWHERE


def _made(tree: ast.ClassDef, name: str) -> int:
    """The first line that assigns or registers `self.NAME`."""
    return min((line for node in ast.walk(tree) for line in _assigned(node, name)), default=0)


def _changed(tree: ast.ClassDef, name: str) -> int:
    """The first line outside of `__init__` that assigns `self.NAME` or calls a method of it that works in place."""
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    nodes = [node for method in methods for node in ast.walk(method)]
    lines = [line for node in nodes for line in (*_assigned(node, name), *_in_place(node, name))]
    return min(lines, default=0)


def _assigned(node: ast.AST, name: str) -> Iterator[int]:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(_is_attribute(part, name) for target in targets for part in ast.walk(target)):
            yield node.lineno
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        given = node.args[0] if node.args else None
        if node.func.attr in _REGISTER and isinstance(given, ast.Constant) and given.value == name:
            yield node.lineno


def _in_place(node: ast.AST, name: str) -> Iterator[int]:
    """Calls such as `self.NAME.copy_(...)`, `self.NAME.data.add_(...)` and `self.NAME.append(...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method, value = node.func.attr, node.func.value
        while isinstance(value, ast.Attribute | ast.Subscript) and not _is_attribute(value, name):
            value = value.value
        if _is_attribute(value, name) and (method.endswith("_") or method in ("append", "update", "extend")):
            yield node.lineno


def _is_attribute(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
