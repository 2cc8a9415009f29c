"""The reference of the library, from its source: signatures, fields and docstrings of what is public.

The source is parsed, not imported, so this takes no torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

Node = ast.ClassDef | ast.FunctionDef
ORDER = ("Job", "Evaluation", "Metric", "EarlyStop", "setup", "Run", "parallelize", "Parallel")
"""What a user meets first; everything else follows by name."""
LEAD = """# Python API

`import meshwright as mw`. Everything on this page is public; other modules may change in any release."""


def api_page(package: Path) -> str:
    modules = _modules(package / "__init__.py")
    names = sorted(modules, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    parts = [_entry(_find(package, modules[name], name)) for name in names]
    return "\n\n".join([LEAD, *parts, _errors(package / "errors.py")]) + "\n"


def _modules(init: Path) -> dict[str, str]:
    """Each public name with the module that defines it."""
    tree = ast.parse(init.read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    public = next(ast.literal_eval(node.value) for node in assigned if _assigns(node, "__all__"))
    imported = {
        alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {name: imported[name] for name in public}


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(to, ast.Name) and to.id == name for to in node.targets)


def _find(package: Path, module: str, name: str) -> Node:
    path = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return next(node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name)


def _entry(node: Node) -> str:
    if isinstance(node, ast.FunctionDef):
        return "\n\n".join([f"## {node.name}", _code(f"mw.{_signature(node)}"), _doc(node)])
    fields, methods = list(_fields(node)), list(_methods(node))
    parts = [f"## {node.name}", _doc(node)]
    if init := next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None):
        parts.insert(1, _code(f"mw.{_signature(init, name=node.name)}"))
    if fields and _is_dataclass(node):
        parts.append("\n".join(["| field | type | default | meaning |", "| --- | --- | --- | --- |", *fields]))
    return "\n\n".join([*parts, *methods])


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """A table's row for each field, with the docstring below it."""
    for place, statement in enumerate(node.body):
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
            after = node.body[place + 1] if place + 1 < len(node.body) else None
            default = "" if statement.value is None else f"`{_cell(ast.unparse(statement.value))}`"
            kind = _cell(ast.unparse(statement.annotation))
            yield f"| `{ast.unparse(statement.target)}` | `{kind}` | {default} | {_cell(_text(after))} |"


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
            marks = {ast.unparse(decorator).split(".")[-1] for decorator in one.decorator_list}
            if marks & {"setter", "deleter", "overload"}:
                continue
            name = f"{node.name}.{one.name}"
            is_value = bool(marks & {"property", "cached_property"})
            shown = (
                f"{name}: {ast.unparse(one.returns) if one.returns else 'Any'}" if is_value else _signature(one, name)
            )
            yield "\n\n".join(filter(None, [f"### {name}", _code(shown), _doc(one)]))


def _signature(node: ast.FunctionDef, name: str = "") -> str:
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, |$)", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    text = f"{name or node.name}({arguments}){returns}"
    return text if len(text) <= 90 else _spread(name or node.name, node, returns)


def _spread(name: str, node: ast.FunctionDef, returns: str) -> str:
    """One argument per line."""
    parsed = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    given = parsed.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    lines = [_argument(argument, default) for argument, default in zip(plain, defaults, strict=True)]
    if given.vararg:
        lines.append(f"*{ast.unparse(given.vararg)}")
    elif given.kwonlyargs:
        lines.append("*")
    lines += [_argument(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        lines.append(f"**{ast.unparse(given.kwarg)}")
    shown = [line for line in lines if line not in ("self", "cls")]
    return f"{name}(\n" + "".join(f"    {line},\n" for line in shown) + f"){returns}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def _errors(path: Path) -> str:
    """The tree of errors, as the module draws it."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return "\n\n".join(["## Errors", "From `meshwright.errors`:", f"```text\n{doc}\n```"])


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _doc(node: Node) -> str:
    """A docstring as Markdown; indented examples become code."""
    return ast.get_docstring(node) or ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
