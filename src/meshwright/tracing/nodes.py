"""How Inductor, PyTorch's compiler, treats an operator of a graph: as a view, fused, or as a separate kernel."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.torch_private.collectives import COLLECTIVES
from meshwright.torch_private.operators import OpOverload

REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "var_mean", "std", "std_mean", "prod"),
    *("any", "all", "cumsum", "cumprod", "logcumsumexp", "logsumexp", "xor_sum", "prepare_softmax_online"),
}
"""Fused with their inputs and their readers, but never computed twice."""
_FUSED = {
    *("arange", "avg_pool2d", "bernoulli", "broadcast_in_dim", "cat", "clone", "constant_pad_nd"),
    "convert_element_type",
    *("copy", "embedding", "empty", "empty_like", "empty_strided", "eye", "flip", "fma", "full", "full_like", "gather"),
    *("index", "index_select", "inductor_lookup_seed", "inductor_random", "inductor_seeds", "iota", "lift_fresh_copy"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "rand", "rand_like"),
    *("randn", "randn_like", "repeat", "roll", "scalar_tensor", "select_scatter", "slice_scatter", "stack", "tril"),
    *("triu", "where", "zeros", "zeros_like", "_low_memory_max_pool_offsets_to_indices"),
    *("_low_memory_max_pool_with_offsets", "_to_copy", "_unsafe_index"),
}
"""Fused operators that PyTorch does not tag as pointwise."""
_SCATTERS = {
    *("index_add", "index_put", "scatter", "scatter_add", "scatter_reduce"),
    *("_unsafe_index_put", "_unsafe_masked_index_put_accumulate"),
}
_VIEWS = {"_unsafe_view", "lift_fresh", "reshape", "wait_tensor"}
"""Views that PyTorch does not mark as such, and the wait for a collective, which returns its result."""
_CONSTANTS = {"full", "full_like", "new_full", "new_zeros", "zeros", "zeros_like"}

Key = tuple[fx.Node, int]
"""A value: a node, and the index among its results."""


def name_of(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (bool(getattr(node.target, "is_view", False)) or name_of(node) in _VIEWS)


def is_getitem(node: fx.Node) -> bool:
    """Whether a node picks one of several results."""
    return node.op == "call_function" and node.target is operator.getitem


def is_constant(node: fx.Node) -> bool:
    """Whether a node is a tensor that the graph holds."""
    return node.op == "get_attr" and isinstance(node.meta.get("val"), Tensor)


def computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_view(node) and not is_getitem(node)


def is_separate(node: fx.Node) -> bool:
    """Whether a node is a separate kernel, such as a matrix product, convolution or attention."""
    if not computes(node):
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return not (pointwise or name_of(node) in _FUSED | REDUCTIONS or _scatters_over_a_constant(node))


def is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") in COLLECTIVES


def is_scatter(node: fx.Node) -> bool:
    """Whether a node changes its first argument in place; it computes the others inline."""
    return is_separate(node) and name_of(node) in _SCATTERS


def base_of(scatter: fx.Node) -> fx.Node | None:
    base = scatter.args[0] if scatter.args else None
    return base if isinstance(base, fx.Node) else None


def _scatters_over_a_constant(node: fx.Node) -> bool:
    """Whether a node scatters over a constant, which is fused as a comparison of indices."""
    base = base_of(node)
    return name_of(node) == "scatter" and base is not None and name_of(base) in _CONSTANTS


def matrices_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two factors of a matrix product."""
    places: Any = {"mm": node.args[:2], "addmm": node.args[1:3]}.get(name_of(node))
    return places if computes(node) else None


def operator_of(node: fx.Node) -> tuple[Any, Any]:
    """The operator and its arguments, unwrapped from an operator that keeps the state of a generator."""
    args: Any = node.args
    place = next((index for index, arg in enumerate(args) if isinstance(arg, OpOverload)), None)
    return (node.target, args) if place is None else (args[place], args[place + 1 :])


def made_by(node: fx.Node) -> list[Key]:
    """The values that a node makes, also those in nested tuples."""
    inner = [key for user in node.users if is_getitem(user) and _is_tuple(user) for key in values_of(user)]
    return [*values_of(node), *inner]


def values_of(node: fx.Node) -> dict[Key, Tensor]:
    """The tensors that a node makes; those of a wrapper are found at its users."""
    if "val" not in node.meta:
        values: Any = {user.args[1]: user.meta.get("val") for user in node.users if is_getitem(user)}
    else:
        values = dict(enumerate(node.meta["val"] if _is_tuple(node) else [node.meta["val"]]))
    return {(node, index): value for index, value in values.items() if isinstance(value, Tensor)}


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def domain_of(node: fx.Node) -> tuple[int, int]:
    """Elements that a node makes, and how many are reduced to each."""
    made = max((v.numel() for v in values_of(node).values()), default=1)
    if name_of(node) not in REDUCTIONS:
        return made, 1
    read = max((v.numel() for source in node.all_input_nodes for v in values_of(source).values()), default=made)
    return made, max(1, read // max(1, made))
