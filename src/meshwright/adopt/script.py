"""A training script as a syntax tree that can be asked questions. Nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from meshwright.errors import BadInput, Unreadable
from meshwright.units import MIB

MOST_BYTES = 4 * MIB
Function = ast.FunctionDef | ast.AsyncFunctionDef
RANK_WORDS = ("rank", "main_process", "master", "is_main", "gpu_id", "process_index", "is_global_zero", "is_primary")
"""Parts of names by which scripts tell one rank from another."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One Python file: its tree, what its names stand for, and who calls whom."""

    path: Path
    text: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Script:
        try:
            if path.stat().st_size > MOST_BYTES:
                raise Unreadable(path, f"it has more than {MOST_BYTES // MIB} MiB; give one training script")
            data = path.read_bytes()
        except OSError as error:
            raise Unreadable(path, error.strerror or str(error)) from None
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes | str, path: Path) -> Script:
        try:
            tree = ast.parse(data)
            text = data if isinstance(data, str) else data.decode()
            parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        except SyntaxError as error:
            raise BadInput(f"{path} is not Python that can be read: line {error.lineno}: {error.msg}.") from None
        except (ValueError, RecursionError, MemoryError) as error:  # null bytes, other encodings, endless nesting
            raise BadInput(f"{path} is not Python that can be read: {error}.") from None
        return cls(path=path, text=text, tree=tree, parents=parents)

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local names and the dotted names that they were imported as."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module or '.'}.{alias.name}"
        return found

    def dotted(self, node: ast.AST) -> str:
        """What an expression names: `nn.Linear` is "torch.nn.Linear"; empty if it is not a name."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    @cached_property
    def calls(self) -> list[ast.Call]:
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Calls of functions and classes by the last part of their imported names."""
        return [call for call in self.calls if self.dotted(call.func).rpartition(".")[2] in names]

    def methods(self, *names: str) -> list[ast.Call]:
        """Calls of methods by name, whatever they are called on."""
        return [call for call in self.calls if isinstance(call.func, ast.Attribute) and call.func.attr in names]

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around one, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> Function | ast.Module:
        return next(
            one for one in self.above(node) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module)
        )

    def loops_of(self, node: ast.AST) -> list[ast.For | ast.While]:
        """The loops around a node within its function, innermost first."""
        found: list[ast.For | ast.While] = []
        for one in self.above(node):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
            if isinstance(one, ast.For | ast.While):
                found.append(one)
        return found

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """Functions and methods by name."""
        found: dict[str, list[Function]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(node)
        return found

    def callers(self, function: ast.AST) -> list[ast.Call]:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return []
        return [call for call in self.calls if last_name(call.func) == function.name]

    def reaches(self, node: ast.AST, targets: Collection[ast.AST]) -> bool:
        """Whether code contains one of `targets`, itself or through functions of this file that it calls."""
        wanted, leading = set(targets), self._leading(frozenset(targets))
        for one in ast.walk(node):
            if one in wanted or (isinstance(one, ast.Call) and last_name(one.func) in leading):
                return True
        return False

    def _leading(self, targets: frozenset[ast.AST]) -> set[str]:
        """Names of functions that contain or call what leads to `targets`."""
        if targets not in self._known_leading:
            found = {name for name, (nodes, _) in self._contents.items() if not nodes.isdisjoint(targets)}
            while more := {name for name, (_, calls) in self._contents.items() if calls & found} - found:
                found |= more
            self._known_leading[targets] = found
        return self._known_leading[targets]

    @cached_property
    def _known_leading(self) -> dict[frozenset[ast.AST], set[str]]:
        return {}

    @cached_property
    def _contents(self) -> dict[str, tuple[set[ast.AST], set[str]]]:
        """By the name of a function: its nodes, and the names of what it calls."""
        found = {}
        for name, bodies in self.functions.items():
            nodes = {node for body in bodies for node in ast.walk(body)}
            found[name] = nodes, {last_name(node.func) for node in nodes if isinstance(node, ast.Call)}
        return found

    def is_guarded(self, node: ast.AST, depth: int = 4) -> bool:
        """Whether only some ranks get there: under an `if` on the rank, here or at every caller."""
        function = self.function_of(node)
        for one in self.above(node):
            if one is function:
                break
            if isinstance(one, ast.If | ast.IfExp) and mentions_rank(one.test):
                return True
        line = getattr(node, "lineno", 0)
        tests = [one for one in ast.walk(function) if isinstance(one, ast.If) and one.lineno < line]
        if any(_leaves_by_rank(one) for one in tests):
            return True
        callers = self.callers(function)
        return bool(callers) and depth > 0 and all(self.is_guarded(call, depth - 1) for call in callers)

    @cached_property
    def assigned(self) -> dict[str, list[ast.Assign | ast.AnnAssign]]:
        """Assignments by the text of their target, such as `model` or `self.model`; tuples by each element."""
        found: dict[str, list[ast.Assign | ast.AnnAssign]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                        found.setdefault(ast.unparse(one), []).append(node)
        return found

    def targets_of(self, call: ast.AST) -> list[str]:
        """The names that get the value of an expression, through chained methods such as `.to(device)`."""
        node = call
        for one in self.above(call):
            if isinstance(one, ast.Assign):
                return [ast.unparse(target) for target in one.targets] if one.value is node else []
            if isinstance(one, ast.AnnAssign):
                return [ast.unparse(one.target)]
            if not isinstance(one, ast.Call | ast.Attribute):
                return []
            node = one
        return []


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def called_on(call: ast.Call) -> ast.expr:
    """What a method is called on."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.value


def names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def mentions_rank(node: ast.AST) -> bool:
    """Whether an expression depends on which rank runs it, by its names."""
    words = [
        one.id if isinstance(one, ast.Name) else one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute)
    ]
    words += [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return any(part in word.lower() for word in words for part in RANK_WORDS)


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((one.value for one in call.keywords if one.arg == name), None)


def argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """An argument by position or keyword."""
    if len(call.args) > place and not any(isinstance(one, ast.Starred) for one in call.args[: place + 1]):
        return call.args[place]
    return keyword(call, name)


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _leaves_by_rank(node: ast.If) -> bool:
    return mentions_rank(node.test) and bool(node.body) and isinstance(node.body[-1], ast.Return | ast.Continue)
