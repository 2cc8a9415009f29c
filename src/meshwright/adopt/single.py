"""Rewrite distributed code as one process would run it: no wrappers, no devices, rank 0 of 1."""

from __future__ import annotations

import ast
from typing import Any

from meshwright.adopt.constants import RANKED
from meshwright.adopt.script import Script, keyword, last_name

WRAPPERS = {
    "DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "fully_shard", "compile",
    "convert_sync_batchnorm", "replicate", "parallelize_module", "prepare_model", "prepare_optimizer",
    "prepare_data_loader",
}  # fmt: skip
"""Functions that return their first argument, for other devices or ranks."""
MOVES = ("cuda", "cpu", "pin_memory", "share_memory", "to")
PLACES = ("device", "rank", "gpu", "cuda", "mps")
DROPPED = (
    "init_process_group", "destroy_process_group", "set_device", "barrier", "wait_for_everyone", "manual_seed",
    "manual_seed_all", "set_seed", "seed_everything", "seed", "fully_shard", "print", "set_description",
    "set_postfix", "info", "debug", "warning", "log", "makedirs", "launch", "set_epoch", "end_training",
    "init_trackers", "set_float32_matmul_precision",
)  # fmt: skip
"""Calls whose statements are left out: they set up processes and seeds, or tell the user something."""
CONTEXTS = (
    "main_process_first",
    "autocast",
    "accumulate",
    "no_sync",
    "join",
    "no_backward_sync",
    "profile",
    "local_main_process_first",
)
_RANKS = {"get_rank": 0, "get_world_size": 1, "get_node_local_rank": 0}


class AsSingle(ast.NodeTransformer):
    """Rewrites expressions and statements; what has no place in one process is dropped."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        name = last_name(node.func)
        source = self._script.dotted(node.func)
        if name in _RANKS and not node.args:
            return ast.Constant(_RANKS[name])
        if isinstance(node.func, ast.Attribute) and name in MOVES and _moves(node) and "_." not in source:
            return node.func.value
        is_wrap = source.rpartition(".")[2] in WRAPPERS and not (source.startswith("re.") or source == "compile")
        if is_wrap and (node.args or node.keywords):
            return node.args[0] if node.args else node.keywords[0].value
        if name in ("setup", "setup_module", "setup_optimizers", "setup_dataloaders", "prepare") and _is_library(
            node.func
        ):
            return node.args[0] if len(node.args) == 1 else ast.Tuple(elts=node.args, ctx=ast.Load())
        if name in ("tqdm", "trange") and node.args:
            return node.args[0] if name == "tqdm" else node
        return node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        self.generic_visit(node)
        if (
            self._script.dotted(node.value) == "os.environ"
            and isinstance(node.slice, ast.Constant)
            and node.slice.value in RANKED
        ):
            return ast.Constant("1" if "WORLD" in str(node.slice.value) else "0")
        return node

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        node.items = [item for item in node.items if not _is_context(item.context_expr)]
        return node if node.items else node.body

    def visit_Expr(self, node: ast.Expr) -> Any:
        self.generic_visit(node)
        value = node.value
        if isinstance(value, ast.Constant | ast.Name | ast.Attribute):
            return None  # a docstring, or what a dropped call leaves
        if isinstance(value, ast.Call) and last_name(value.func) in DROPPED:
            return None
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        same = len(node.targets) == 1 and ast.unparse(node.targets[0]).strip("()") == ast.unparse(node.value).strip(
            "()"
        )
        if not same and _is_initialize(self._script, node.value):
            return _initialized(node)
        return None if same else node


def _moves(call: ast.Call) -> bool:
    """Whether `.to(...)` moves to a device, and does not change the dtype."""
    if last_name(call.func) != "to":
        return True
    values = [*call.args, *(one.value for one in call.keywords if one.arg not in ("non_blocking", "memory_format"))]
    texts = [ast.unparse(one).lower() for one in values]
    if any("float" in text or "dtype" in text or "int" in text.split(".")[-1][:3] for text in texts):
        return False
    return all(any(part in text for part in PLACES) or text.isdecimal() or text == "'cpu'" for text in texts)


def _is_library(node: ast.expr) -> bool:
    owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
    return any(part in owner.lower() for part in ("accelerator", "fabric"))


def _is_context(node: ast.expr) -> bool:
    name = last_name(node.func if isinstance(node, ast.Call) else node)
    return name in CONTEXTS or name in ("ctx", "amp_ctx", "autocast_ctx", "nullcontext")


def _is_initialize(script: Script, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and script.dotted(node.func) == "deepspeed.initialize"


def _initialized(node: ast.Assign) -> Any:
    """`engine, optimizer, _, _ = deepspeed.initialize(...)`: the engine is the model."""
    call, target = node.value, node.targets[0]
    assert isinstance(call, ast.Call)
    given = [keyword(call, name) for name in ("model", "optimizer", "training_data", "lr_scheduler")]
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    made = []
    for name, value in zip(targets, given, strict=False):
        if value is not None and ast.unparse(name) not in ("_", ast.unparse(value)):
            made.append(ast.copy_location(ast.Assign(targets=[name], value=value), node))
    return made or None
