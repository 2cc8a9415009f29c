"""Private names of PyTorch are used in `meshwright/torch_private` alone, and each of them has a test in this folder."""

import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from meshwright.torch_private.modules import REGISTERED

SOURCE = Path(__file__).parents[2] / "src"
FOLDER = SOURCE / "meshwright" / "torch_private"
DEEPSPEED = SOURCE / "meshwright" / "strategies" / "deepspeed"
FILES = [path for path in sorted((SOURCE / "meshwright").rglob("*.py")) if FOLDER not in path.parents]
TESTED = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")

PRIVATE = re.compile(r"_(?!_|meshwright_)\w+")
OTHERS = {"_fields", "_tp_plan", "_keys_to_ignore_on_load_unexpected"}
"""Of named tuples and of Transformers' models."""
DOCUMENTED = {("torch.overrides", "TorchFunctionMode")}
"""Not in the `__all__` of its module, but in PyTorch's documentation."""
LOOKUPS = {"getattr", "setattr", "hasattr", "delattr", "object", "attrgetter", "methodcaller"}


def is_private(name: Any) -> bool:
    return isinstance(name, str) and PRIVATE.fullmatch(name) is not None


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Names of methods and attributes that a file's classes have of their own."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                yield from (name for statement in body for name in named_by(statement))
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def named_by(node: ast.stmt) -> Iterator[str]:
    """What a statement in the body of a class or a file gives a name to."""
    match node:
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")], value=names):
            yield from ast.literal_eval(names)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            yield name


@cache
def our_names() -> frozenset[str]:
    trees = [ast.parse(path.read_text()) for path in FILES]
    return frozenset({name for tree in trees for name in defined_in(tree)} | {*OTHERS, *REGISTERED})


def from_torch(tree: ast.AST) -> set[str]:
    """What a file calls things that it imports from PyTorch."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names if is_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def is_torch(module: str | None) -> bool:
    return (module or "").split(".")[0] == "torch"


def unlisted(module: str, name: str) -> bool:
    """Whether a module of PyTorch has a list of its public names and this is none of them."""
    found = importlib.import_module(module)
    listed = getattr(found, "__all__", None)
    if listed is None or name in listed or (module, name) in DOCUMENTED:
        return False
    return not isinstance(getattr(found, name, found), ModuleType)


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def uses(source: str) -> Iterator[str]:
    """A line for each private name of PyTorch in a file's text."""
    tree = ast.parse(source)
    ours, theirs = our_names(), from_torch(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                found = [alias.name for alias in aliases if is_torch(alias.name)]
                bad = [name for name in found if any(map(is_private, name.split(".")))]
            case ast.ImportFrom(module=str(module), names=aliases) if is_torch(module):
                names = [alias.name for alias in aliases]
                hidden = any(map(is_private, module.split(".")))
                bad = [f"{module}.{name}" for name in names if hidden or is_private(name) or unlisted(module, name)]
            case ast.Attribute(value=value, attr=name) if is_private(name):
                root = root_of(value)
                bad = [name] if root in theirs or (name not in ours and root not in ("os", "sys")) else []
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=args) if called in LOOKUPS:
                words = [arg.value for arg in args if isinstance(arg, ast.Constant)]
                bad = [word for word in words if is_private(word) and word not in ours]
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=word)):
                bad = [word] if is_private(word) and word not in ours else []
            case ast.Constant(value=str(text)) if re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", text):
                bad = [text]
            case _:
                bad = []
        yield from (f"line {getattr(node, 'lineno', 0)}: {name}" for name in bad)


def overridden(module: ModuleType) -> Iterator[str]:
    """Private methods of PyTorch's classes that a module's classes replace."""
    for cls in vars(module).values():
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        methods = {name for name, value in vars(cls).items() if is_private(name) and isinstance(value, FunctionType)}
        theirs = {name for base in cls.__mro__ if is_torch(base.__module__) for name in vars(base)}
        yield from (f"{cls.__name__}.{name}" for name in methods & theirs)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_are_used_only_in_the_folder(path: Path) -> None:
    if DEEPSPEED not in path.parents:  # which has private names of DeepSpeed
        assert list(uses(path.read_text())) == []


def test_private_methods_are_replaced_only_in_the_folder() -> None:
    found = []
    for path in FILES:
        if path.stem != "__main__":
            name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
            with suppress(ImportError):
                found += overridden(importlib.import_module(name))
    assert found == []


@pytest.mark.parametrize("path", TESTED, ids=lambda path: path.stem)
def test_each_name_of_the_folder_has_a_test(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {name for node in tree.body for name in named_by(node) if not name.startswith("_")}
    module = f"meshwright.torch_private.{path.stem}"
    tested = {
        alias.name
        for test in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(test.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }
    assert names and names <= tested


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._dynamo import on_compile_start",
        "from torch.overrides import _pop_mode_temporarily",
        "from torch.utils.flop_counter import flop_registry",
        "import torch\ntorch._foreach_mul_(tensors, 2)",
        "import torch\ntorch.Tensor._parameters",
        "import torch.distributed as dist\ndist.distributed_c10d._resolve_process_group(name)",
        "from torch import nn\nnn.modules.batchnorm._BatchNorm",
        "tensor._base",
        "tensor.untyped_storage()._cdata",
        "self._compiled_call_impl = None",
        'getattr(tensor, "_backward_hooks", None)',
        'patch.object(autograd, "_engine_run_backward", run)',
        'vars(module)["_compiled_call_impl"]',
        'logging.getLogger("torch._subclasses.fake_tensor")',
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert len(list(uses(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nfrom torch import Tensor, nn\nfrom torch.overrides import TorchFunctionMode",
        "from meshwright.torch_private.trees import tree_leaves",
        "module._parameters[name]",
        "self.__dict__",
        "os._exit(1)",
        'getattr(module, "_meshwright_name")',
        "class A:\n    def _own(self): return self._own()",
        '"_to_copy" in names',
    ],
)
def test_another_name_is_let_be(source: str) -> None:
    names = frozenset(defined_in(ast.parse(source)))
    assert [line for line in uses(source) if line.split()[-1] not in names] == []


def test_a_replaced_method_is_found() -> None:
    from torch import nn

    module = ModuleType("made_up")
    module.Own = type("Own", (nn.Conv1d,), {"_conv_forward": lambda self: None, "__module__": "made_up"})  # type: ignore[attr-defined]
    assert list(overridden(module)) == ["Own._conv_forward"]
