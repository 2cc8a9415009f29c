"""The defaults of a script's command line."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

from meshwright.adopt.constants import UNKNOWN, evaluate
from meshwright.adopt.script import Script, is_false, keyword, last_name

PARSERS = ("parse_args", "parse_known_args")


def parses(script: Script, node: ast.AST) -> bool:
    """Whether an expression reads the command line with argparse, itself or in a function of this file."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in PARSERS:
        return True
    bodies = script.functions.get(node.func.id, []) if isinstance(node.func, ast.Name) else []
    returned = [one.value for body in bodies for one in ast.walk(body) if isinstance(one, ast.Return) and one.value]
    return any(_is_parsed(script, body, one) for body in bodies for one in returned)


def _is_parsed(script: Script, body: ast.AST, value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and last_name(value.func) in PARSERS:
        return True
    if not isinstance(value, ast.Name):
        return False
    sources = [
        one.value for one in ast.walk(body) if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == value.id
    ]
    return any(isinstance(one, ast.Call) and last_name(one.func) in PARSERS for one in sources)


def defaults(script: Script) -> tuple[SimpleNamespace, list[str]]:
    """The values of all options where the command line is empty, and the names of those that it must give."""
    found: dict[str, Any] = {}
    needed = []
    for call in script.methods("add_argument"):
        names = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if not names:
            continue
        name = _destination(call, names)
        value = _default(script, call)
        is_needed = keyword(call, "default") is None and (not names[0].startswith("-") or _is_required(call))
        if is_needed:
            needed.append(name)
        found.setdefault(name, None if value is UNKNOWN else value)
    return SimpleNamespace(**found), needed


def _is_required(call: ast.Call) -> bool:
    value = keyword(call, "required")
    return value is not None and not is_false(value)


def _destination(call: ast.Call, names: list[str]) -> str:
    given = keyword(call, "dest")
    if isinstance(given, ast.Constant):
        return str(given.value)
    long = next((name for name in names if name.startswith("--")), names[0])
    return long.lstrip("-").replace("-", "_")


def _default(script: Script, call: ast.Call) -> Any:
    action = keyword(call, "action")
    given = keyword(call, "default")
    if given is None and isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
        return action.value == "store_false"
    value = None if given is None else evaluate(given, {}, script.dotted)
    kind = keyword(call, "type")
    if isinstance(value, str) and isinstance(kind, ast.Name) and kind.id in ("int", "float"):
        return float(value) if kind.id == "float" else int(value)  # argparse converts text defaults
    return value
