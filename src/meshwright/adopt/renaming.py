"""Names of an inlined function as the straight script calls them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


class Renamed(ast.NodeTransformer):
    """Names of a function as they are called in the straight script; `self.x` becomes a name."""

    def __init__(self, names: Mapping[str, str], attributes: Mapping[tuple[str, str], str]) -> None:
        self._names, self._attributes = names, attributes

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Name(id=self._names.get(node.id, node.id), ctx=node.ctx), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in self._attributes:
            return ast.copy_location(ast.Name(id=self._attributes[node.value.id, node.attr], ctx=node.ctx), node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        own = {arg.arg for arg in [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]}
        own |= {arg.arg for arg in (node.args.vararg, node.args.kwarg) if arg}
        inner = Renamed({k: v for k, v in self._names.items() if k not in own}, self._attributes)
        node.name = self._names.get(node.name, node.name)
        node.body = [inner.visit(one) for one in node.body]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        own = {arg.arg for arg in node.args.args}
        node.body = Renamed({k: v for k, v in self._names.items() if k not in own}, self._attributes).visit(node.body)
        return node


def same_shape(value: ast.expr, target: ast.expr) -> bool:
    if isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple):
        return len(value.elts) == len(target.elts)
    return isinstance(value, ast.Name) and isinstance(target, ast.Name)


def call_alike(value: ast.expr, target: ast.expr, names: dict[str, str]) -> None:
    """Call a function's locals as the caller calls what it returns."""
    values = value.elts if isinstance(value, ast.Tuple) else [value]
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    for one, other in zip(values, targets, strict=False):
        if (
            isinstance(one, ast.Name)
            and isinstance(other, ast.Name)
            and one.id in names
            and other.id not in names.values()
        ):
            names[one.id] = other.id
