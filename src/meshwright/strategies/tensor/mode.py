"""The mode in which torch functions accept divided tensors and give the results of whole ones.

A function with a rule runs on this rank's parts. Any other function runs on gathered tensors, which is correct but not
divided. `gathered` counts those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from meshwright.strategies import intercepted
from meshwright.strategies.recorder import refuse_recording
from meshwright.strategies.tensor import rules
from meshwright.strategies.tensor.attention import attention, dropout
from meshwright.strategies.tensor.layout import (
    dim_of,
    divided,
    is_divided,
    keep_gradients,
    local,
    part,
    pieces_of,
    whole,
    whole_of_fused,
)
from meshwright.strategies.tensor.loss import cross_entropy
from meshwright.strategies.tensor.matrix import add_product, embedding, forget_input, linear, matmul
from meshwright.strategies.tensor.memory import change, check_current, note_views, refuse_other_shape
from meshwright.strategies.tensor.rules import Rule, functions
from meshwright.torch_private.modes import function_modes
from meshwright.torch_private.trees import tree_leaves, tree_map

RESHAPES = "view reshape flatten unflatten view_as reshape_as ravel"
_TABLE: list[tuple[Rule, str]] = [
    (
        rules.elementwise,
        "add sub subtract rsub mul multiply div divide true_divide neg negative pow square exp exp2 expm1 log log2 "
        "log1p sqrt rsqrt reciprocal sigmoid tanh sin cos erf abs sign relu relu6 gelu silu mish elu celu selu "
        "leaky_relu hardtanh hardswish hardsigmoid softplus logsigmoid clamp clamp_min clamp_max clip maximum minimum "
        "where masked_fill eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not "
        "isnan isinf isfinite addcmul addcdiv lerp floor ceil round nan_to_num "
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ "
        "__rpow__ __neg__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__ "
        "zeros_like ones_like full_like empty_like",
    ),
    (rules.convert, "to float half bfloat16 double type_as contiguous clone detach"),
    (rules.make_new, "new_zeros new_ones new_full new_empty new_tensor"),
    (rules.move_dims, "transpose permute swapaxes swapdims movedim moveaxis unsqueeze squeeze t adjoint"),
    (rules.reshape, RESHAPES),
    (rules.expand, "expand"),
    (rules.expand_as, "expand_as"),
    (rules.repeat, "repeat"),
    (rules.repeat_interleave, "repeat_interleave"),
    (rules.split, "split chunk split_with_sizes"),
    (rules.unbind, "unbind"),
    (rules.select, "select"),
    (rules.narrow, "narrow"),
    (rules.get_item, "__getitem__"),
    (rules.concatenate, "cat concat concatenate"),
    (rules.stack, "stack"),
    (rules.along_a_dim, "softmax log_softmax"),
    (rules.reduce, "sum mean"),
    (rules.layer_norm, "layer_norm rms_norm"),
    (matmul, "matmul bmm mm __matmul__"),
    (linear, "linear"),
    (add_product, "addmm"),
    (embedding, "embedding"),
    (attention, "scaled_dot_product_attention"),
    (dropout, "dropout"),
    (cross_entropy, "cross_entropy"),
]
_RULES: dict[Any, Rule] = {func: rule for rule, names in _TABLE for func in functions(names)}
_PROPERTIES = (("T", rules.move_dims), ("mT", rules.move_dims), ("data", rules.convert))
_RULES |= {getattr(Tensor, name).__get__: rule for name, rule in _PROPERTIES}

# A fused tensor is in its pieces' order: all functions but these get it whole.
_RULES_OF_PIECES: dict[Any, Rule] = {
    **dict.fromkeys(functions("split chunk split_with_sizes"), rules.split_pieces),
    **dict.fromkeys(functions("__getitem__"), rules.get_piece),
    **dict.fromkeys(functions("narrow"), rules.narrow_piece),
    **dict.fromkeys(functions(RESHAPES), rules.reshape),
    **dict.fromkeys(functions("to float half bfloat16 double type_as contiguous"), rules.convert),
    F.linear: linear,
    torch.addmm: add_product,
    F.cross_entropy: cross_entropy,
}

# These run on the DTensor itself, which knows the whole shape. Printing is here because one rank may print alone.
_ON_DTENSOR = functions(
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_signed "
    "get_device storage_offset requires_grad_ retain_grad register_hook __len__ __hash__ __repr__ __str__ __format__ "
    "has_names is_same_size __dir__ is_inference _is_view is_tensor is_set_to"
)
_OF_GRADIENTS = functions("retain_grad register_hook")
_VIEWS = functions(
    "view reshape flatten unflatten view_as reshape_as transpose permute swapaxes swapdims movedim squeeze unsqueeze "
    "expand expand_as split chunk split_with_sizes unbind select narrow __getitem__ diagonal unfold detach"
) | {getattr(Tensor, name).__get__ for name in ("T", "mT", "data")}


class DividedFunctions(TorchFunctionMode):
    rules: ClassVar[Mapping[Any, Rule]] = _RULES
    rules_of_pieces: ClassVar[Mapping[Any, Rule]] = _RULES_OF_PIECES

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.gathered: Counter[str] = Counter()
        """The number of runs of each function on whole tensors, because no rule handled its arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            return self._differentiate(func, args, kwargs)
        if func is torch.autograd.grad:  # gradients are divided like the tensors they belong to
            for x in tree_leaves(args[1:2] or kwargs.get("inputs")):
                if is_divided(x, self.mesh):
                    keep_gradients(x)
            return func(*args, **kwargs)
        tensors = list(tensors_of(args, kwargs))
        for tensor in tensors:
            check_current(tensor)
        if not any(is_divided(tensor, self.mesh) for tensor in tensors):
            return self._on_plain(func, args, kwargs)
        if func in _ON_DTENSOR or (_is_property(func) and func not in self.rules):
            if func in _OF_GRADIENTS:
                keep_gradients(args[0])
            return func(*args, **kwargs)
        if intercepted.changes_its_input(func, args, kwargs):
            return self._change(func, args, kwargs)
        result = self._run(func, args, kwargs)
        if func in _VIEWS and is_divided(args[0], self.mesh):
            note_views(args[0], tree_leaves(result))
        return result

    def _differentiate(self, func: Any, args: Any, kwargs: Any) -> None:
        """Run backward with the mode on, for recomputed blocks. A mode is off while it handles a function."""
        run = intercepted.backward_pass(func, args, kwargs)
        if run is None:
            func(*args, **kwargs)
            return
        with self:
            run()

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        fused = any(is_divided(leaf, self.mesh) and pieces_of(leaf) > 1 for leaf in tensors_of(args, kwargs))
        result = self._by_rule((self.rules_of_pieces if fused else self.rules).get(func), func, args, kwargs)
        if result is not NotImplemented:
            return result
        if fused:  # a rule may handle the gathered tensor
            args, kwargs = self._whole((args, kwargs), only_fused=True)
            return self.__torch_function__(func, (), args, kwargs)
        return self._on_whole(func, args, kwargs)

    def _on_whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.gathered[getattr(func, "__name__", str(func))] += 1
        whole_args, whole_kwargs = self._whole((args, kwargs))
        return self._on_plain(func, whole_args, whole_kwargs)

    def _on_plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function none of whose arguments is divided."""
        return func(*args, **kwargs)

    def _by_rule(self, rule: Rule | None, func: Any, args: Any, kwargs: Any) -> Any:
        if rule is None:
            return NotImplemented
        try:
            return rule(func, self.mesh, *args, **kwargs)
        except (torch.OutOfMemoryError, dist.DistError, CheckpointError):
            raise
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
            # The rule does not handle these arguments. If they are wrong, the function itself will say so. All ranks
            # get here, because their parts have the same shape.
            return NotImplemented

    def _whole(self, tree: Any, only_fused: bool = False) -> Any:
        def gather(leaf: Any) -> Any:
            if not is_divided(leaf, self.mesh) or (only_fused and pieces_of(leaf) == 1):
                return leaf
            return whole(leaf, self.mesh) if pieces_of(leaf) == 1 else whole_of_fused(leaf, self.mesh)

        return tree_map(gather, tree)

    def _change(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute the new value and copy it into the tensor to change."""
        target = kwargs.get("out", args[0] if args else None)
        if not is_divided(target, self.mesh):
            return self._on_whole(func, args, kwargs)
        refuse_recording("it changes a divided tensor in place")
        found = self._new_value(func, target, args, kwargs)
        refuse_other_shape(target, found)
        change(target, self._laid_out_like(target, found))
        return target

    def _laid_out_like(self, target: DTensor, value: Tensor) -> DTensor:
        dim, pieces = dim_of(target), pieces_of(target)
        if pieces == 1:
            return divided(part(value, dim, self.mesh), dim, self.mesh)
        if is_divided(value, self.mesh) and (dim_of(value), pieces_of(value)) == (dim, pieces):
            return divided(local(value), dim, self.mesh, pieces)
        by_piece = whole(value, self.mesh).unflatten(dim, (pieces, -1))
        return divided(part(by_piece, dim + 1, self.mesh).flatten(dim, dim + 1), dim, self.mesh, pieces)

    def _new_value(self, func: Any, target: DTensor, args: Any, kwargs: Any) -> Any:
        if "out" in kwargs:
            return self._run(func, args, {key: value for key, value in kwargs.items() if key != "out"})
        if intercepted.has_inplace(func, args, kwargs):
            return self._run(func, *intercepted.not_in_place(func, args, kwargs))
        if (out_of_place := _out_of_place(func)) is not None:
            return self._run(out_of_place, args, kwargs)
        value = whole(target, self.mesh).clone()
        self._on_whole(func, (value, *args[1:]), kwargs)
        return value


def tensors_of(args: Any, kwargs: Any) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _is_property(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


@cache
def _out_of_place(func: Any) -> Any:
    """The out-of-place version of an in-place function."""
    name = func.__name__
    plain = intercepted.IN_PLACE_OPERATORS.get(name) or name.removesuffix("_")
    return getattr(Tensor, plain, None) if plain != name else None


def mode_of(mesh: DeviceMesh) -> DividedFunctions:
    """The mode of a mesh, stored on the mesh because a global table would outlive the process group."""
    mode: DividedFunctions = mesh.__dict__.setdefault("_meshwright_mode", DividedFunctions(mesh))
    return mode


@contextmanager
def tensor_region(mesh: DeviceMesh) -> Iterator[None]:
    """Region in which functions accept divided tensors. Regions may nest, and each thread enters separately."""
    if any(isinstance(mode, DividedFunctions) and mode.mesh == mesh for mode in function_modes()):
        yield
        return
    try:
        with mode_of(mesh):
            yield
    finally:
        forget_input()
