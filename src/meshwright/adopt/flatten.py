"""Turn a script into one straight list of statements: calls of its own functions inlined, branches chosen.

Only functions that take part in the training are inlined: those that lead to a backward pass, an optimizer, a loader or
a learning-rate schedule. Branches whose condition follows from literals and the command line's defaults are decided.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.adopt.arguments import defaults, parses
from meshwright.adopt.constants import UNKNOWN, evaluate
from meshwright.adopt.kind import OPTIMIZERS, TRAINERS, Kind
from meshwright.adopt.renaming import Renamed, call_alike, same_shape
from meshwright.adopt.script import Function, Script, last_name
from meshwright.adopt.single import AsSingle
from meshwright.adopt.slices import stored_names

DEPTH = 12
LAUNCHERS = {"spawn": "nprocs", "notebook_launcher": "", "start_processes": "nprocs"}


@dataclass
class Flat:
    """The straight script."""

    statements: list[ast.stmt] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)
    """Names with their values where they are literals."""
    namespace: dict[str, Any] = field(default_factory=dict)
    """Names of the parsed command line, with its defaults."""
    missing: list[str] = field(default_factory=list)
    """Options without a default."""


def flatten(script: Script, kind: Kind) -> Flat:
    """The script as one process runs it with the defaults of its command line."""
    return _Flattener(script, kind).run()


class _Flattener:
    def __init__(self, script: Script, kind: Kind) -> None:
        self.script, self.flat, self.single = script, Flat(), AsSingle(script)
        wanted = set(script.calls_of(*OPTIMIZERS, "DataLoader", "StatefulDataLoader"))
        wanted |= {call for call in script.calls if "lr_scheduler" in script.dotted(call.func)}
        wanted |= {call for call in script.calls_of("get_scheduler") or [] if isinstance(call.func, ast.Name)}
        self.targets: set[ast.AST] = {*wanted, *kind.backward, *(script.calls_of(*TRAINERS) if kind.trainer else ())}
        self.classes = {node.name: node for node in script.tree.body if isinstance(node, ast.ClassDef)}
        self.instances: dict[str, ast.ClassDef] = {}
        self.attributes: dict[tuple[str, str], str] = {}
        self.stored: set[tuple[str, str]] = set()
        self.used: set[str] = set()
        values, self.flat.missing = defaults(script)
        self.arguments = values

    def run(self) -> Flat:
        body = [one for one in self.script.tree.body if not isinstance(one, ast.FunctionDef | ast.ClassDef)]
        self.used = {last for one in body for last in stored_names(one)}
        self.flat.statements = self._block(body, {}, 0)
        return self.flat

    def _block(
        self, body: list[ast.stmt], names: dict[str, str], depth: int, result: ast.expr | None = None
    ) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, ast.Return):
                if result is not None and statement.value is not None:
                    made = ast.copy_location(
                        ast.Assign(targets=[copy.deepcopy(result)], value=statement.value), statement
                    )
                    value = self._renamed(made.value, names)
                    made.value = value
                    found += self._finished(made)
                break
            found += self._statement(statement, names, depth, result)
        return found

    def _statement(
        self, statement: ast.stmt, names: dict[str, str], depth: int, result: ast.expr | None
    ) -> list[ast.stmt]:
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.Pass | ast.Assert):
            return []
        if isinstance(statement, ast.If) and _is_main(statement.test):
            return self._block(statement.body, names, depth, result)
        if isinstance(statement, ast.If):
            return self._branch(statement, names, depth, result)
        if isinstance(statement, ast.For | ast.While | ast.With | ast.Try):
            return self._compound(statement, names, depth, result)
        if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign) and depth < DEPTH:
            inlined = self._inlined(statement, names, depth)
            if inlined is not None:
                return inlined
        if isinstance(statement, ast.Assign) and self._is_alias(statement, names):
            return []
        return self._finished(self._renamed(statement, names))

    def _is_alias(self, statement: ast.Assign, names: Mapping[str, str]) -> bool:
        """Whether a statement only stores a name in `self`; the attribute is then called by that name."""
        target = statement.targets[0]
        if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)):
            return False
        value = self.single.visit(self._renamed(statement.value, names))
        key = names.get(target.value.id, target.value.id), target.attr
        if key not in self.attributes or not isinstance(value, ast.Name) or key in self.stored:
            return False
        self.attributes[key] = value.id
        self.stored.add(key)
        return True

    def _renamed(self, node: Any, names: Mapping[str, str]) -> Any:
        return Renamed(names, self.attributes).visit(copy.deepcopy(node))

    def _finished(self, statement: ast.stmt) -> list[ast.stmt]:
        """A statement as one process runs it; literals that it assigns are remembered."""
        lines = {"lineno": getattr(statement, "lineno", 1), "col_offset": 0}
        if isinstance(statement, ast.Assign) and parses(self.script, statement.value):
            target = (
                statement.targets[0].elts[0] if isinstance(statement.targets[0], ast.Tuple) else statement.targets[0]
            )
            name = ast.unparse(target)
            self.flat.namespace[name] = self.flat.known[name] = self.arguments
            return []
        done = self.single.visit(statement)
        made = done if isinstance(done, list) else [done] if done is not None else []
        for one in made:
            ast.fix_missing_locations(one)
            if not hasattr(one, "lineno"):
                one.lineno = lines["lineno"]
            self._remember(one)
        return made

    def _remember(self, statement: ast.stmt) -> None:
        for name in stored_names(statement):
            self.flat.known.pop(name, None)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            value = evaluate(statement.value, self.flat.known, self.script.dotted)
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = [
                    (one, evaluate(v, self.flat.known, self.script.dotted))
                    for one, v in zip(target.elts, statement.value.elts, strict=False)
                ]
            for one, known in pairs:
                if known is not UNKNOWN and isinstance(one, ast.Name):
                    self.flat.known[one.id] = known

    def _branch(self, statement: ast.If, names: dict[str, str], depth: int, result: ast.expr | None) -> list[ast.stmt]:
        test = self.single.visit(self._renamed(statement.test, names))
        value = evaluate(test, self.flat.known, self.script.dotted)
        if value is not UNKNOWN:
            return self._block(statement.body if value else statement.orelse, names, depth, result)
        before = dict(self.flat.known)
        body = self._block(statement.body, names, depth, result)
        self.flat.known = dict(before)
        orelse = self._block(statement.orelse, names, depth, result)
        self.flat.known = {
            k: v for k, v in before.items() if k not in {n for one in (*body, *orelse) for n in stored_names(one)}
        }
        if not body and not orelse:
            return []
        made = ast.If(test=test, body=body or [ast.Pass()], orelse=orelse)
        return [ast.fix_missing_locations(ast.copy_location(made, statement))]

    def _compound(self, statement: Any, names: dict[str, str], depth: int, result: ast.expr | None) -> list[ast.stmt]:
        for name in stored_names(statement):  # a loop may run its body any number of times
            self.flat.known.pop(names.get(name, name), None)
        if isinstance(statement, ast.Try):
            return self._block(statement.body, names, depth, result)
        body = self._block(statement.body, names, depth, result)
        orelse = self._block(getattr(statement, "orelse", []), names, depth, result)
        shell = copy.copy(statement)
        shell.body = [ast.Pass()]
        if hasattr(shell, "orelse"):
            shell.orelse = []
        made = self._renamed(shell, names)
        made.body = body or [ast.Pass()]
        if orelse:
            made.orelse = orelse
        done = self.single.visit(made) if isinstance(made, ast.With) else made
        if isinstance(made, ast.For):
            made.iter = self.single.visit(made.iter)
        found = done if isinstance(done, list) else [done]
        return [
            ast.fix_missing_locations(ast.copy_location(one, statement) if not hasattr(one, "lineno") else one)
            for one in found
        ]

    def _inlined(self, statement: Any, names: dict[str, str], depth: int) -> list[ast.stmt] | None:
        """The body of a function that a statement calls, or None if it is not one to inline."""
        call = statement.value
        while (
            isinstance(call, ast.Call)
            and last_name(call.func) in ("item", "detach", "to", "cpu")
            and isinstance(call.func, ast.Attribute)
        ):
            call = call.func.value
        if not isinstance(call, ast.Call):
            return None
        call = self._launched(call)
        call = self._renamed(call, names)
        target: ast.expr | None = None
        if isinstance(statement, ast.Assign):
            target = self._renamed(statement.targets[0], names)
        elif isinstance(statement, ast.AnnAssign):
            target = self._renamed(statement.target, names)
        name = last_name(call.func)
        if isinstance(call.func, ast.Name) and name in self.classes and isinstance(target, ast.Name):
            return self._constructed(self.classes[name], call, target.id, depth)
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id in self.instances:
            method = next(
                (one for one in self.instances[owner.id].body if isinstance(one, ast.FunctionDef) and one.name == name),
                None,
            )
            return None if method is None else self._body(method, call, target, depth, instance=owner.id)
        function = next(
            (one for one in self.script.tree.body if isinstance(one, ast.FunctionDef) and one.name == name), None
        )
        if function is None or not isinstance(call.func, ast.Name) or not self.script.reaches(function, self.targets):
            return None
        return self._body(function, call, target, depth)

    def _launched(self, call: ast.Call) -> ast.Call:
        """`mp.spawn(main, args=(...))` as `main(0, ...)`."""
        name = last_name(call.func)
        if name not in LAUNCHERS or not call.args:
            return call
        given = next(
            (one.value for one in call.keywords if one.arg == "args"), call.args[1] if len(call.args) > 1 else None
        )
        values = list(given.elts) if isinstance(given, ast.Tuple | ast.List) else []
        rank: list[ast.expr] = [ast.Constant(0)] if name != "notebook_launcher" else []
        return ast.copy_location(ast.Call(func=call.args[0], args=[*rank, *values], keywords=[]), call)

    def _constructed(self, made: ast.ClassDef, call: ast.Call, name: str, depth: int) -> list[ast.stmt] | None:
        """An object of a class of the script whose methods train."""
        methods = [one for one in made.body if isinstance(one, ast.FunctionDef)]
        bases = {last_name(base) for base in made.bases}
        if bases & {"Module", "Dataset", "IterableDataset"} or not any(
            self.script.reaches(one, self.targets) for one in methods
        ):
            return None
        self.instances[name] = made
        for method in methods:
            for node in ast.walk(method):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "self"
                    and isinstance(node.ctx, ast.Store)
                ):
                    self.attributes.setdefault((name, node.attr), self._fresh(node.attr, f"{name}_{node.attr}"))
        init = next((one for one in methods if one.name == "__init__"), None)
        return [] if init is None else self._body(init, call, None, depth, instance=name)

    def _fresh(self, name: str, other: str = "") -> str:
        number, found = 2, name
        while found in self.used:
            found = other if other and other not in self.used else f"{name}_{number}"
            number += 1
        self.used.add(found)
        return found

    def _body(
        self, function: Function, call: ast.Call, target: ast.expr | None, depth: int, *, instance: str = ""
    ) -> list[ast.stmt] | None:
        if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
            return None
        names: dict[str, str] = {}
        made: list[ast.stmt] = []
        parameters = [*function.args.posonlyargs, *function.args.args]
        if instance:
            names[parameters[0].arg], parameters = instance, parameters[1:]
        given = dict(zip([one.arg for one in parameters], call.args, strict=False)) | {
            one.arg: one.value for one in call.keywords if one.arg
        }
        plain = [*reversed(list(zip(reversed(parameters), reversed(function.args.defaults), strict=False)))]
        fallback = {one.arg: value for one, value in plain}
        fallback |= {
            one.arg: value
            for one, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if value is not None
        }
        for parameter in [*(one.arg for one in parameters), *(one.arg for one in function.args.kwonlyargs)]:
            value = given.get(parameter, fallback.get(parameter))
            if isinstance(value, ast.Name) and parameter in given:
                names[parameter] = value.id
            elif value is not None:
                names[parameter] = self._fresh(parameter)
                store = ast.Name(id=names[parameter], ctx=ast.Store())
                made += self._finished(ast.copy_location(ast.Assign(targets=[store], value=copy.deepcopy(value)), call))
        for local in sorted(_local_names(function) - set(names)):
            names[local] = self._fresh(local)
        result = target
        if target is not None:
            outer = ast.unparse(target)
            single = [one.value for one in function.body if isinstance(one, ast.Return)]
            if len(single) == 1 and single[0] is not None and same_shape(single[0], target):
                call_alike(single[0], target, names)
                result = (
                    None if ast.unparse(self._renamed(single[0], names)).strip("()") == outer.strip("()") else target
                )
        return made + self._block(function.body, names, depth + 1, result)


def _local_names(function: Function) -> set[str]:
    return {name for one in function.body for name in stored_names(one)}


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and "__name__" in ast.unparse(test)
