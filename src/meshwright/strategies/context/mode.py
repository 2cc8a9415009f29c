"""The mode in which the tokens of a model are divided over the ranks of the context axis.

It has the rules of the tensor axis: a function with a rule runs on this rank's tokens, and any other one on gathered
tensors. Tokens are divided where a model looks them up (`embedding`) and where blocks begin (`enter_block`). Parameters
are whole on every rank, and their gradients are shares that the data strategy sums (`strategies/shares.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies import intercepted
from meshwright.strategies.context import attention, pieces
from meshwright.strategies.mesh_axis import divides
from meshwright.strategies.shares import has_shares, mark_shares, once
from meshwright.strategies.tensor import rules
from meshwright.strategies.tensor.attention import dropout
from meshwright.strategies.tensor.layout import dim_of, divided, innermost, is_divided, local, part, shared
from meshwright.strategies.tensor.matrix import linear
from meshwright.strategies.tensor.mode import RESHAPES, DividedFunctions, tensors_of
from meshwright.strategies.tensor.rules import Rule, functions
from meshwright.torch_private.autograd import own_functions_given
from meshwright.torch_private.modes import function_modes
from meshwright.torch_private.trees import tree_leaves, tree_map

TOKENS = 1
"""The dim of the tokens in a block's input, (batch, tokens, width)."""


def embedding(func: Rule, mesh: DeviceMesh, index: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Each rank looks up its own tokens."""
    if not is_divided(index, mesh):
        index = divided(part(index, -1, mesh), -1, mesh)
    return divided(F.embedding(local(index), shared(weight, mesh), *args, **kwargs), dim_of(index), mesh)


_BY_ROWS: list[tuple[Rule, str]] = [
    (linear, "linear"),
    (dropout, "dropout"),
    (rules.layer_norm, "layer_norm rms_norm"),
    (rules.along_a_dim, "softmax log_softmax"),
    (rules.reduce, "sum mean"),
    (attention.add_product, "addmm"),
]


_RULES: dict[Any, Rule] = {
    **DividedFunctions.rules,
    **dict.fromkeys(functions(RESHAPES), rules.reshape_rows),
    **dict.fromkeys(functions("matmul bmm mm __matmul__"), attention.matmul),
    **dict.fromkeys(functions("addmm"), attention.add_product),
    F.scaled_dot_product_attention: attention.attention,
    F.cross_entropy: pieces.cross_entropy,
    F.embedding: embedding,
}
_RULES_OF_PIECES: dict[Any, Rule] = {
    **{func: pieces.by_rows(rule) for func, rule in DividedFunctions.rules.items() if rule is rules.elementwise},
    **{func: pieces.by_rows(rule) for rule, names in _BY_ROWS for func in functions(names)},
    **dict.fromkeys(functions(RESHAPES), rules.reshape_rows),
    **dict.fromkeys(functions("to float half bfloat16 double type_as contiguous clone detach"), rules.convert),
    F.cross_entropy: pieces.cross_entropy,
}


class TokenFunctions(DividedFunctions):
    rules = _RULES
    rules_of_pieces = _RULES_OF_PIECES

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.tokens = 0
        """The number of tokens that were divided last."""

    def _on_plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.embedding and self._are_tokens(kwargs.get("input", args[0] if args else None)):
            found = self._by_rule(embedding, func, args, kwargs)
            if found is not NotImplemented:
                self.tokens = found.shape[dim_of(found)]
                return found
        return self._on_parameters(func, args, kwargs) if torch.is_grad_enabled() else func(*args, **kwargs)

    def _are_tokens(self, index: Any) -> bool:
        """Whether an index has a dim of tokens: the last of several, or as many as were divided before."""
        if not isinstance(index, Tensor) or not index.dim() or not divides(index.shape[-1], self.mesh):
            return False
        return index.dim() > 1 or index.shape[-1] == self.tokens

    def _on_parameters(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of whole tensors, some of which may be parameters."""
        given = [tensor for tensor in tensors_of(args, kwargs) if tensor.requires_grad]
        shares = [has_shares(tensor, self.mesh) for tensor in given]
        if not any(shares):
            return func(*args, **kwargs)
        if all(shares):
            result = func(*args, **kwargs)
            for leaf in tree_leaves(result) if isinstance(result, Tensor | list | tuple) else ():
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    mark_shares(leaf)
            return result
        changed = intercepted.changed_by(func, args, kwargs)
        if changed is not None and has_shares(changed, self.mesh):
            shared_args, shared_kwargs = tree_map(self._shared_unless(changed), (args, kwargs))
            return func(*shared_args, **shared_kwargs)
        args, kwargs = tree_map(self.keep_whole, (args, kwargs))
        return func(*args, **kwargs)

    def _shared_unless(self, changed: Tensor) -> Callable[[Any], Any]:
        return lambda leaf: shared(leaf, self.mesh) if isinstance(leaf, Tensor) and leaf is not changed else leaf

    def keep_whole(self, leaf: Any) -> Any:
        """A tensor with a whole gradient, for what every rank computes."""
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or not has_shares(leaf, self.mesh):
            return leaf
        return innermost(leaf, None, lambda own: once(own, self.mesh.size()))


def token_mode(mesh: DeviceMesh) -> TokenFunctions:
    """The mode of a mesh, stored on the mesh because a global table would outlive the process group."""
    mode: TokenFunctions = mesh.__dict__.setdefault("_meshwright_token_mode", TokenFunctions(mesh))
    return mode


@contextmanager
def token_region(mesh: DeviceMesh) -> Iterator[None]:
    """Region in which functions accept divided tokens. Regions may nest."""
    mode = token_mode(mesh)
    if any(one is mode for one in function_modes()):
        yield
        return

    def convert(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """No mode sees a model's own autograd functions; what they return for a parameter is a whole gradient."""
        return tuple(mode.keep_whole(leaf) for leaf in args)

    with mode, own_functions_given(convert), rules.without_fusing():
        yield


def enter_block(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, mesh: DeviceMesh) -> Any:
    """Divide the tokens of a block's first input, if they came whole: after a patch embedding, say."""
    with token_region(mesh):
        if args and _has_tokens(args[0], mesh):
            args = (divided(part(args[0], TOKENS, mesh), TOKENS, mesh), *args[1:])
        return forward(*args, **kwargs)


def _has_tokens(x: Any, mesh: DeviceMesh) -> bool:
    if not isinstance(x, Tensor) or is_divided(x, mesh):
        return False
    return x.dim() == TOKENS + 2 and x.is_floating_point() and divides(x.shape[TOKENS], mesh)
