"""Rules for flattened tokens: (batch, tokens) as one dim, of which each rank has a part of every sample's tokens.

Such a tensor is fused: its samples are its pieces. Rows are independent in most functions, so a rule for one piece
serves: the rows are called the part of a plain tensor while it runs.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.pieced_loss.arguments import LossArguments
from meshwright.strategies.parts import own_part
from meshwright.strategies.tensor import rules
from meshwright.strategies.tensor.layout import add_up, dim_of, divided, is_divided, local, pieces_of, whole
from meshwright.strategies.tensor.rules import Rule
from meshwright.torch_private.trees import tree_leaves, tree_map


def by_rows(rule: Rule) -> Rule:
    """A rule for tensors of flattened tokens, from one that treats rows alone and keeps their dim."""

    def run(func: Rule, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
        fused = [leaf for leaf in tree_leaves((args, kwargs)) if is_divided(leaf, mesh)]
        layouts = {(leaf.dim() - dim_of(leaf), leaf.shape[dim_of(leaf)], pieces_of(leaf)) for leaf in fused}
        if len(layouts) != 1:
            return NotImplemented
        ((place, size, pieces),) = layouts

        def as_rows(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if is_divided(leaf, mesh):
                return divided(local(leaf), dim_of(leaf), mesh)
            has_rows = leaf.dim() >= place and leaf.shape[-place] == size
            if not has_rows or rule is not rules.elementwise:
                return leaf
            if leaf.requires_grad:
                raise ValueError("The gradients of these rows would have to be gathered.")
            return divided(own_part(leaf, leaf.dim() - place, pieces, mesh), leaf.dim() - place, mesh)

        args, kwargs = tree_map(as_rows, (args, kwargs))
        result = rule(func, mesh, *args, **kwargs)

        def as_pieces(leaf: Any) -> Any:
            return divided(local(leaf), dim_of(leaf), mesh, pieces) if is_divided(leaf, mesh) else leaf

        return NotImplemented if result is NotImplemented else tree_map(as_pieces, result)

    return run


def cross_entropy(func: Rule, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """Cross entropy of logits that are divided over tokens, with targets that every rank has."""
    given = LossArguments(*args, **kwargs)
    input, target = given.input, given.target
    classes = 1 if input.dim() > 1 else 0
    if not given.is_plain or not given.has_indices or is_divided(target, mesh) or not is_divided(input, mesh):
        return NotImplemented
    dim, pieces = dim_of(input), pieces_of(input)
    if dim == classes:
        return NotImplemented
    rows = dim - (dim > classes)
    own = own_part(target, rows, pieces, mesh)
    if given.reduction == "none":
        losses = F.cross_entropy(local(input), own, ignore_index=given.ignore_index, reduction="none")
        return whole(divided(losses, rows, mesh, pieces), mesh)
    total = add_up(F.cross_entropy(local(input), own, ignore_index=given.ignore_index, reduction="sum"), mesh)
    return total / (target != given.ignore_index).sum() if given.reduction == "mean" else total
