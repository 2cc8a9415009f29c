"""Context parallelism: each rank holds a part of every sample's tokens through the whole step.

The model and its parameters stay as they are. The author's `forward` runs on divided tensors by rules that give the
results of whole ones (`mode.py`), so positions, masks and losses need no care: a function without a rule costs a
gather, but is never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.recording.wrap_forward import wrap_forward
from meshwright.strategies.context.mode import enter_block, token_mode, token_region
from meshwright.strategies.mesh_axis import balance
from meshwright.strategies.shares import sum_later
from meshwright.strategies.tensor.layout import whole
from meshwright.torch_private.trees import tree_map


def split_tokens(model: nn.Module, mesh: DeviceMesh, blocks: Sequence[str], *, balanced: bool) -> None:
    """Divide the tokens of a model over a one-dimensional mesh, `balanced` for causal attention."""
    balance(mesh, wanted=balanced)
    sum_later(mesh)
    for name in blocks:
        wrap_forward(model.get_submodule(name), partial(enter_block, mesh=mesh))
    wrap_forward(model, partial(_in_region, mesh=mesh))


def _in_region(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, mesh: DeviceMesh) -> Any:
    with token_region(mesh):
        return forward(*args, **kwargs)


def to_plain(tree: Any, mesh: DeviceMesh) -> Any:
    """Gather the divided tensors of a tree on every rank, differentiably."""
    mode = token_mode(mesh)
    return tree_map(lambda leaf: mode.keep_whole(whole(leaf, mesh)) if isinstance(leaf, torch.Tensor) else leaf, tree)


def gathered_functions(mesh: DeviceMesh) -> dict[str, int]:
    """The number of runs of each function on gathered tensors so far."""
    return dict(token_mode(mesh).gathered)
