"""Tensor parallelism: each rank holds a part of every linear layer, and computes with that part.

Parameters are plain tensors of the local size, so data strategies and optimizers handle them like any others. During a
layer's call its parameters become divided tensors (`layout.py`), and the author's `forward` runs on them by rules that
give the results of whole tensors (`mode.py`). A function without a rule costs a gather, but is never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.describe.linear_layers import output_dim
from meshwright.facts.tensor_plan import TensorPlan, TensorRow
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.strategies.cuts import Cut, Cuts, narrow
from meshwright.strategies.tensor.layout import divided, whole
from meshwright.strategies.tensor.matrix import along_sequence
from meshwright.strategies.tensor.memory import as_parameter
from meshwright.strategies.tensor.mode import mode_of, tensor_region
from meshwright.strategies.tensor.replay import BlockPrograms
from meshwright.torch_private.trees import tree_map


def split_tensors(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, blocks: Sequence[str]) -> Cuts:
    """Divide a model on the meta device over a one-dimensional mesh. Modules that a stage lacks are skipped."""
    modules = dict(model.named_modules(remove_duplicate=False))
    rows = [row for row in plan.for_ranks(mesh.size()).divided if row.module in modules]
    cut_of = {id(p): cut for row in rows for p, cut in _cuts_of(modules[row.module], row, mesh)}
    cuts = _narrow_all(model, cut_of)
    for row in rows:
        along = plan.sequence and row.role in ("row", "vocabulary")  # their results are sums over ranks
        run = partial(_with_parts, cuts=_own(cuts, row.module), mesh=mesh, sums_along_sequence=along)
        wrap_forward(modules[row.module], run)
    programs = BlockPrograms(mesh)
    for module in _recorded(modules, blocks, {row.module for row in rows}, sequence=plan.sequence):
        wrap_forward(module, programs)
    wrap_forward(model, partial(_in_region, mesh=mesh))
    return cuts


def _cuts_of(module: nn.Module, row: TensorRow, mesh: DeviceMesh) -> Iterator[tuple[nn.Parameter, Cut]]:
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    outputs = 0 if row.role == "vocabulary" and isinstance(module, nn.Embedding) else output_dim(module)
    if weight is not None:
        dim = 1 - outputs if row.role == "row" else outputs
        yield weight, Cut(dim=dim, mesh=mesh, pieces=row.pieces)
    if bias is not None and row.role != "row":
        yield bias, Cut(dim=0, mesh=mesh, pieces=row.pieces)


def _narrow_all(model: nn.Module, cut_of: dict[int, Cut]) -> Cuts:
    """Replace every parameter that is cut, also under its other names."""
    named = model.named_parameters(remove_duplicate=False)  # modules may have several names as well
    cuts = {name: cut_of[id(parameter)] for name, parameter in named if id(parameter) in cut_of}
    narrowed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in cut_of:
                narrow(module, attribute, cut_of[id(parameter)], narrowed)
    return cuts


def _recorded(
    modules: dict[str, nn.Module], blocks: Sequence[str], divided: set[str], *, sequence: bool
) -> Iterator[nn.Module]:
    """The modules that run as programs: blocks, and outside of them divided layers and norms of divided sequences.

    Other modules outside of blocks get whole tensors, on which a function takes less time than a program's conditions.
    """
    found: set[int] = set()
    for name, module in modules.items():
        outside = not any(name.startswith(f"{block}.") for block in blocks)
        is_norm = sequence and not [*module.children()] and {p.dim() for p in module.parameters()} == {1}
        if id(module) not in found and (name in blocks or (outside and (name in divided or is_norm))):
            found.add(id(module))
            yield module


def _own(cuts: Cuts, module: str) -> Cuts:
    prefix = f"{module}."
    own = {name.removeprefix(prefix): cut for name, cut in cuts.items() if name.startswith(prefix)}
    return {name: cut for name, cut in own.items() if "." not in name}


def _in_region(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, mesh: DeviceMesh) -> Any:
    with tensor_region(mesh):
        return forward(*args, **kwargs)


def _with_parts(
    module: nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    cuts: Cuts,
    mesh: DeviceMesh,
    sums_along_sequence: bool,
) -> Any:
    """Run a layer with divided parameters, swapped in for the call because data strategies need the plain ones."""
    originals = {name: p for name in cuts if (p := module._parameters.get(name)) is not None}
    for name in originals:
        cut = cuts[name]
        low: torch.Tensor = getattr(module, name)  # a copy, if the model computes in a smaller dtype
        module._parameters[name] = as_parameter(divided(low, cut.dim, mesh, cut.pieces))  # type: ignore[assignment]
    try:
        with tensor_region(mesh), along_sequence(sums_along_sequence):
            return forward(*args, **kwargs)
    finally:
        module._parameters.update(originals)


def to_plain(tree: Any, mesh: DeviceMesh) -> Any:
    """Gather the divided tensors of a tree on every rank, differentiably."""
    return tree_map(lambda leaf: whole(leaf, mesh) if isinstance(leaf, torch.Tensor) else leaf, tree)


def gathered_functions(mesh: DeviceMesh) -> dict[str, int]:
    """The number of runs of each function on gathered tensors so far."""
    return dict(mode_of(mesh).gathered)
