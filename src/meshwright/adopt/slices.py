"""Which statements of a straight script a name depends on."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.adopt.script import last_name

HARMLESS = (
    "to", "cuda", "cpu", "train", "eval", "requires_grad_", "share_memory", "compile", "parameters",
    "named_parameters", "state_dict", "print_trainable_parameters", "print", "watch", "summary", "save",
    "num_parameters", "zero_grad", "update", "close", "append", "add_argument", "parse_args",
)  # fmt: skip
"""Calls that leave a model, a data set or an optimizer as it is for one process that trains."""


def stored_names(node: ast.AST) -> set[str]:
    """Names that a statement binds, also in its branches."""
    found: set[str] = set()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.add(child.id)
        found |= stored_names(child)
    return found


def read_names(node: ast.AST) -> set[str]:
    """Names that code needs from outside: read somewhere, and not its own parameters or loop variables."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            arguments = node.args
            own = {one.arg for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
            own |= {one.arg for one in (arguments.vararg, arguments.kwarg) if one}
            body = node.body if isinstance(node.body, list) else [node.body]
            own |= {name for one in body for name in stored_names(one)}
            inner = {name for one in body for name in read_names(one)} - own
            outside = [
                *arguments.defaults,
                *(one for one in arguments.kw_defaults if one),
                *getattr(node, "decorator_list", []),
            ]
            hints = [
                one.annotation
                for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                if one.annotation
            ]
            returns = [node.returns] if not isinstance(node, ast.Lambda) and node.returns else []
            return inner | {name for one in [*outside, *hints, *returns] for name in read_names(one)}
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            own = {name for one in node.generators for name in _targets(one.target)}
            parts: list[ast.AST] = [part for one in node.generators for part in (one.iter, *one.ifs)]
            parts += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return {name for one in parts for name in read_names(one)} - own
        case ast.ClassDef():
            names = {name for one in ast.iter_child_nodes(node) for name in read_names(one)}
            return names - {name for one in node.body for name in stored_names(one)} - {node.name}
        case ast.Name():
            return {node.id} if not isinstance(node.ctx, ast.Store) else set()
        case ast.AugAssign():
            return read_names(node.value) | {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
    return {name for child in ast.iter_child_nodes(node) for name in read_names(child)}


def _targets(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def touched_names(statement: ast.stmt) -> set[str]:
    """Names whose values a statement changes in place."""
    found: set[str] = set()
    for node in _walk_here(statement):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            found |= {
                base for one in targets if (base := _base(one)) and isinstance(one, ast.Attribute | ast.Subscript)
            }
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and last_name(node.value.func) not in HARMLESS
        ):
            found |= _called_on(node.value)
        if isinstance(node, ast.For) and any(touched_names(one) & _targets(node.target) for one in node.body):
            found |= read_names(node.iter)
    return found


def _called_on(call: ast.Call) -> set[str]:
    """What a call as a statement may change: the object whose method it is, and its arguments."""
    found = {_base(call.func)} if isinstance(call.func, ast.Attribute) else set()
    return {name for name in found | {_base(one) for one in call.args} if name}


def _base(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _walk_here(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement, without those of functions that it defines."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield from _walk_here(child)


@dataclass(frozen=True)
class Slicer:
    """Backward slices of a list of statements."""

    statements: Sequence[ast.stmt]

    def of(
        self, names: Iterable[str], *, given: Iterable[str] = (), keep: Callable[[ast.stmt], bool] = lambda _: True
    ) -> list[int]:
        """The places of all statements that `names` depend on, in order.

        Names in `given` are not followed, and statements that `keep` refuses are passed over.
        """
        stop = {*given, *dir(builtins)}
        wanted = set(names) - stop
        found = []
        for place in range(len(self.statements) - 1, -1, -1):
            statement = self.statements[place]
            stored = stored_names(statement)
            changed = (touched_names(statement) | stored) & wanted
            if not changed or not keep(statement):
                continue
            found.append(place)
            if isinstance(statement, ast.Assign | ast.FunctionDef) and not stored & read_names(statement):
                wanted -= {name for name in stored if isinstance(statement, ast.FunctionDef) or _is_plain(statement)}
            wanted |= read_names(statement) - stop
        return found[::-1]


def _is_plain(statement: ast.stmt) -> bool:
    """Whether an assignment binds whole names, not parts of objects."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return all(not isinstance(one, ast.Attribute | ast.Subscript) for one in targets)
