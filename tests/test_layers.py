"""Imports go one way: a file imports only from layers below its own, and modules never import in a circle."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"

# Lowest first. Parts of one layer do not import each other, except the single files at the package's root.
LAYERS = (
    (
        "errors",
        "deferred_warnings",
        "environment",
        "importing",
        "reading",
        "units",
        "version",
    ),
    ("facts",),
    ("torch_private",),
    ("recording", "pieced_loss"),
    (
        "adopt",
        "describe",
        "exchange",
        "jobs",
        "launch",
        "schedules",
    ),
    ("strategies",),
    ("assemble",),
    ("checkpoint",),
    (
        "planner",
        "tracing",
        "runtime",
    ),
    (
        "preflight",
        "verify",
        "probe",
    ),
    ("compare", "rehearse"),
    ("commands",),
    ("api",),
    ("__init__",),
    ("report",),
    ("serve",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}
ROOT_FILES = {"errors", "deferred_warnings", "environment", "importing", "reading", "units", "version"}


def module_name(path: Path) -> str:
    parts = ("meshwright", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part_of(module: str) -> str:
    """The folder or root file that decides a module's layer: "facts" for meshwright.facts.model."""
    return [*module.split("."), "__init__"][1]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def statements(tree: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    """All nodes, or only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import and isinstance(node, ast.If) and is_type_checking(node):
            for other in node.orelse:
                yield other
                yield from statements(other, at_import)
            continue
        yield node
        yield from statements(node, at_import)


def source_package(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    """The absolute name of what stands after "from"."""
    if not node.level:
        return node.module or ""
    above = module.split(".")
    above = above[: len(above) - node.level + is_package]
    return ".".join([*above, node.module] if node.module else above)


def imports(module: str, source: str, *, at_import: bool = False, is_package: bool = False) -> set[str]:
    """The modules of this package that `module` imports, anywhere in it or only while being imported itself."""
    found = set()
    for node in statements(ast.parse(source), at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = source_package(module, node, is_package)
            names = {f"{package}.{alias.name}" for alias in node.names}
            submodules = {name for name in names if name in MODULES or name.removeprefix("meshwright.") in HEIGHT}
            found |= submodules
            if names - submodules:
                found.add(package)
    return {name for name in found if name == "meshwright" or name.startswith("meshwright.")}


def may_import(module: str, other: str) -> bool:
    part, target = part_of(module), part_of(other)
    if part == target or ({part, target} <= ROOT_FILES and HEIGHT[part] == HEIGHT[target]):
        return True
    return HEIGHT[target] < HEIGHT[part]


def upward_imports(module: str, source: str, is_package: bool = False) -> list[str]:
    """A line for each import that does not go down the table of layers."""
    found = sorted(imports(module, source, is_package=is_package))
    strangers = [name for name in (module, *found) if part_of(name) not in HEIGHT]
    if strangers:
        return [f"{name} has no layer: add it to LAYERS and to the design" for name in strangers]
    return [f"{module} imports {other}" for other in found if not may_import(module, other)]


def import_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, first and last the same; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    path = MODULES[module]
    assert upward_imports(module, path.read_text(), path.name == "__init__.py") == []


def test_no_import_cycles() -> None:
    graph = {
        module: imports(module, path.read_text(), at_import=True, is_package=path.name == "__init__.py")
        for module, path in MODULES.items()
    }
    assert import_cycle(graph) == []


def test_the_design_s_table_is_this_one() -> None:
    """docs/design.md numbers the layers as they are checked here, except the package's own entry points."""
    design = (PACKAGE.parents[1] / "docs" / "design.md").read_text()
    section = design.partition("\n## Layers\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", section, flags=re.MULTILINE)
    told: dict[int, set[str]] = {}
    for number, folders in rows:
        told.setdefault(int(number), set()).update(re.findall(r"`(\w+)(?:/|\.py)`", folders))
    checked = [set(layer) for layer in LAYERS if not set(layer) <= {"__init__", "__main__"}]
    assert [told[number] for number in sorted(told)] == checked


def test_the_package_is_found() -> None:
    assert "meshwright.errors" in MODULES


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("meshwright.facts.model", "from meshwright.assemble.mesh import Mesh"),
        ("meshwright.facts.model", "import meshwright.runtime.loop"),
        ("meshwright.facts.model", "from meshwright import Job"),
        ("meshwright.facts.model", "from ..strategies import table"),
        ("meshwright.facts.model", "def late():\n    from meshwright.cli import main"),
        ("meshwright.facts.model", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import meshwright.api"),
        ("meshwright.planner.search", "from meshwright.runtime import launch"),
        ("meshwright.launch.launch", "from meshwright import planner"),
        ("meshwright.planner.search", "from meshwright.tracing import trace"),
        ("meshwright.tracing.trace", "from meshwright.planner import search"),
        ("meshwright.describe.model", "from meshwright.schedules import text"),
        ("meshwright.api", "from meshwright.report import table"),
        ("meshwright.units", "from meshwright.facts import model"),
        ("meshwright.helpers", "import torch"),
        ("meshwright.cli.main", "import meshwright.helpers"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(upward_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("meshwright.facts.model", "import torch\nfrom meshwright.errors import MeshwrightError"),
        ("meshwright.facts.model", "from . import strategy\nfrom .plan import Plan"),
        ("meshwright.units", "from meshwright import errors"),
        ("meshwright.assemble.mesh", "from ..strategies.fsdp import apply"),
        ("meshwright", "from meshwright.api import setup\nfrom meshwright.runtime.loop import Run"),
        ("meshwright.cli.train", "import meshwright as mw\nfrom meshwright import __version__"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert upward_imports(module, source, is_package=module == "meshwright") == []


def test_a_cycle_is_found() -> None:
    sources = {
        "meshwright.facts": "from .model import Model",
        "meshwright.facts.model": "try:\n    import meshwright.facts.plan\nexcept ImportError:\n    pass",
        "meshwright.facts.plan": "from meshwright.facts import Model",
    }
    graph = {name: imports(name, sources[name], at_import=True, is_package=name.count(".") == 1) for name in sources}
    assert set(import_cycle(graph)) == set(sources)


def test_imports_that_do_not_run_make_no_cycle() -> None:
    typed = "if TYPE_CHECKING:\n    import meshwright.api\nelse:\n    import meshwright.units\n"
    source = typed + "def late():\n    import meshwright.cli"
    assert imports("meshwright.facts.model", source, at_import=True) == {"meshwright.units"}
