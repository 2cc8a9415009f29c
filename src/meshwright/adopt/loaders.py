"""Find the loader that a straight script trains on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from meshwright.adopt.flatten import Flat
from meshwright.adopt.parts import Parts
from meshwright.adopt.script import Script, last_name

LOADERS = ("DataLoader", "StatefulDataLoader")


def loader_name(node: ast.expr) -> str:
    """The loader of `for batch in loader`, through enumerate, islice, zip and the like; empty if it is made there."""
    while isinstance(node, ast.Call) and node.args and last_name(node.func) not in LOADERS:
        node = node.args[0]
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def loaders(script: Script, flat: Flat) -> set[str]:
    return {name for name, _ in made_by(script, flat.statements, LOADERS)}


def made_by(script: Script, statements: list[ast.stmt], classes: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    """Names with the calls of these classes that make them."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if script.dotted(node.value.func).rpartition(".")[2] in classes and isinstance(target, ast.Name):
                    yield target.id, node.value


def made_in_order(script: Script, parts: Parts) -> list[str]:
    return [name for name, _ in made_by(script, parts.prelude, LOADERS)]


def loader_behind(script: Script, flat: Flat, name: str) -> str:
    """The loader of `active = train_loader` and `active = skip_first_batches(train_loader, n)`."""
    made = loaders(script, flat)
    nodes = [node for statement in flat.statements for node in ast.walk(statement)]
    sources = [one.value for one in nodes if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name]
    behind = [] if name in made else [found for one in sources if (found := loader_name(one)) in made]
    return behind[0] if behind else name


def loader_call(script: Script, parts: Parts) -> ast.Call | None:
    made = dict(made_by(script, parts.prelude, LOADERS))
    if parts.loader in made:
        return made[parts.loader]
    iterated = parts.loop.iter if parts.loop is not None else None
    calls = (
        []
        if iterated is None
        else [one for one in ast.walk(iterated) if isinstance(one, ast.Call) and last_name(one.func) in LOADERS]
    )
    return calls[0] if calls else None
