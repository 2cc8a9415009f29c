"""The code around a job's functions: imports, classes and functions of the script, and the settings that they read."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field

from meshwright.adopt.flatten import Flat
from meshwright.adopt.parts import Parts
from meshwright.adopt.script import Script, last_name
from meshwright.adopt.slices import Slicer, read_names, stored_names

BUILTINS = set(dir(builtins)) | {"__file__", "__name__"}
LIBRARIES = ("Accelerator", "Fabric")
ALONE = (
    'SimpleNamespace(device=torch.device("cpu"), mixed_precision="no", distributed_type="NO", num_processes=1, '
    "process_index=0, is_main_process=True, is_local_main_process=True, world_size=1, global_rank=0)"
)
PLACES = {"device", "rank", "local_rank", "gpu", "world_size", "device_type"}


@dataclass
class Pieces:
    """What a job file needs beside its functions."""

    imports: list[str] = field(default_factory=list)
    body: list[tuple[tuple[int, int], str]] = field(default_factory=list)
    """Definitions and settings, each with its place in the script."""
    unknown: list[str] = field(default_factory=list)
    """Names that the script does not define where they could be taken from."""
    options: set[str] = field(default_factory=set)
    """Options of the command line that are read."""
    neighbours: list[str] = field(default_factory=list)
    """Modules of the script's folder."""


class Collector:
    """Collects, for some code, everything of the script that it needs."""

    def __init__(self, script: Script, flat: Flat, parts: Parts, given: set[str]) -> None:
        """`given` are names that the job provides in another way: the model, the optimizer, the loader."""
        self.script, self.flat, self.parts, self.given = script, flat, parts, given
        self.slicer = Slicer(parts.prelude)
        nodes = (
            *script.tree.body,
            *(inner for one in script.tree.body if isinstance(one, ast.If | ast.Try) for inner in one.body),
        )
        self.definitions = {
            one.name: one for one in nodes if isinstance(one, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        }
        self._namespaces: list[str] = []
        self.stored = {name for one in parts.prelude for name in stored_names(one)}

    def settings(self, names: set[str]) -> set[int]:
        """Statements before the loop that these names depend on, also through functions of the script."""
        found: set[int] = set()
        todo, seen = set(names), set[str]()
        while todo:
            name = todo.pop()
            if name in seen or name in self.given:
                continue
            seen.add(name)
            if name in self.definitions and name not in self.stored:
                todo |= read_names(self.definitions[name])
            elif name in self.stored:
                places = self.slicer.of({name}, given=self.given)
                found |= set(places)
                todo |= {other for place in places for other in read_names(self.parts.prelude[place])}
        return found

    def collect(self, code: list[str], settings: set[int], defined: set[str]) -> Pieces:
        """All that `code` and `settings` need; `defined` are the names that the job file defines itself."""
        pieces = Pieces()
        reads = {name for text in code for one in ast.parse(text).body for name in read_names(one)}
        for place in sorted(settings):
            statement = self.parts.prelude[place]
            reads |= {name for one in ast.parse(self._text(statement)).body for name in read_names(one)}
            defined = defined | stored_names(statement)
            is_top = statement in self.script.tree.body or statement.lineno < self._first_inlined()
            pieces.body.append(((0 if is_top else 1, statement.lineno if is_top else place), self._text(statement)))
        done: set[str] = set()
        while todo := reads - done - defined - BUILTINS:
            for name in sorted(todo):
                done.add(name)
                reads |= self._resolve(name, pieces)
        for name in self._namespaces:
            self._add_namespace(name, [*code, *(text for _, text in pieces.body)], pieces)
        pieces.body.sort(key=lambda one: one[0])
        return pieces

    def _add_namespace(self, name: str, code: list[str], pieces: Pieces) -> None:
        """The options of the command line that are read, or all of them if they are handed on together."""
        values = vars(self.flat.namespace[name])
        nodes = [node for text in code for node in ast.walk(ast.parse(text))]
        uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
        reads = [node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name]
        pieces.options |= set(values) if len(reads) < len(uses) else set(reads)
        rows = ", ".join(f"{key}={value!r}" for key, value in values.items() if key in pieces.options)
        pieces.body.append(((0, 0), f"# The command line's defaults.\n{name} = SimpleNamespace({rows})"))

    def _first_inlined(self) -> int:
        return min((one.lineno for one in self.definitions.values()), default=1 << 30)

    def _text(self, statement: ast.stmt) -> str:
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign) and isinstance(value, ast.Call) and last_name(value.func) in LIBRARIES:
            return f"{ast.unparse(statement.targets[0])} = {ALONE}"
        return ast.unparse(statement)

    def _resolve(self, name: str, pieces: Pieces) -> set[str]:
        """Add what defines a name; returns the names that the definition reads."""
        if name in self.flat.namespace:
            self._namespaces.append(name)
            return {"SimpleNamespace"}
        if name in self.definitions:
            node = self.definitions[name]
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            lines = self.script.text.splitlines()[first - 1 : node.end_lineno]
            pieces.body.append(((0, first), "\n".join(lines)))
            return read_names(node)
        if name in self.script.imports or name == "SimpleNamespace":
            self._import(name, pieces)
            return set()
        if name in PLACES:
            pieces.body.append(
                ((0, 0), f'{name} = "cpu"' if "device" in name else f"{name} = {int(name == 'world_size')}")
            )
            return set()
        stars = [
            one for one in ast.walk(self.script.tree) if isinstance(one, ast.ImportFrom) and one.names[0].name == "*"
        ]
        if stars:
            pieces.imports += [f"from {'.' * one.level}{one.module or ''} import *" for one in stars]
            pieces.neighbours += [
                root for one in stars if self._is_neighbour(root := (one.module or ".").split(".")[0])
            ]
            return set()
        pieces.unknown.append(name)
        pieces.body.append(((0, 0), f"{name} = None  # TODO"))
        return set()

    def _import(self, name: str, pieces: Pieces) -> None:
        if name == "SimpleNamespace" and name not in self.script.imports:
            pieces.imports.append("from types import SimpleNamespace")
            return
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Import):
                pieces.imports += [
                    f"import {one.name}" + (f" as {one.asname}" if one.asname else "")
                    for one in node.names
                    if (one.asname or one.name.split(".")[0]) == name
                ]
                roots = {one.name.split(".")[0] for one in node.names if (one.asname or one.name.split(".")[0]) == name}
            elif isinstance(node, ast.ImportFrom):
                chosen = [one for one in node.names if (one.asname or one.name) == name]
                source = "." * node.level + (node.module or "")
                pieces.imports += [
                    f"from {source} import {one.name}" + (f" as {one.asname}" if one.asname else "") for one in chosen
                ]
                roots = {source.split(".")[0] or source} if chosen else set()
            else:
                continue
            pieces.neighbours += [root for root in roots if self._is_neighbour(root)]

    def _is_neighbour(self, root: str) -> bool:
        folder = self.script.path.parent
        return (
            root.startswith(".")
            or root == ""
            or (folder / f"{root}.py").exists()
            or (folder / root / "__init__.py").exists()
        )
