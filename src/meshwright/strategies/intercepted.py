"""What a torch function mode must know about the calls that it intercepts: in-place changes and backward passes.

A mode that handles `Tensor.backward` or `torch.autograd.backward` is off during the call. A direct call of the autograd
engine does not go through modes, so a mode can stay on while it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from meshwright.torch_private.autograd import run_engine


def changed_by(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a call changes in place; None if it changes none."""
    if not changes_its_input(func, args, kwargs):
        return None
    target = kwargs.get("out", args[0] if args else None)
    return target if isinstance(target, Tensor) else None


def changes_its_input(func: Any, args: Any, kwargs: Any) -> bool:
    return _is_in_place(func) or kwargs.get("out") is not None or has_inplace(func, args, kwargs)


@lru_cache(maxsize=4096)
def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.startswith("__")) or name == "__setitem__" or name in IN_PLACE_OPERATORS


IN_PLACE_OPERATORS = {
    f"__i{name}__": f"__{name}__"
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
}


def has_inplace(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call sets `inplace`, as a keyword or by position."""
    names = _argument_names(func)
    return "inplace" in names and bool((dict(zip(names, args, strict=False)) | kwargs).get("inplace", False))


def not_in_place(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    place = _argument_names(func).index("inplace")
    return args[:place] + args[place + 1 :], {**kwargs, "inplace": False}


@cache
def _argument_names(func: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(func).parameters) if inspect.isfunction(func) else ()
    except ValueError:
        return ()


def backward_pass(func: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """The engine call that `func`, one of these two, would make; None if its arguments are not plain tensors."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    roots = _listed(given["self"] if func is Tensor.backward else given["tensors"])
    gradients = _listed(given["gradient"] if func is Tensor.backward else given["grad_tensors"]) or (None,) * len(roots)
    inputs = _listed(given["inputs"])
    if not all(isinstance(tensor, Tensor) for tensor in (*roots, *inputs)) or given.get("grad_variables") is not None:
        return None
    whole = tuple(
        torch.ones_like(root) if gradient is None and root.requires_grad and root.numel() == 1 else gradient
        for root, gradient in zip(roots, gradients, strict=True)
    )
    create = given["create_graph"]
    retain = create if given["retain_graph"] is None else given["retain_graph"]
    return partial(run_engine, roots, whole, retain, create, inputs, allow_unreachable=True, accumulate_grad=True)


def _listed(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, Tensor) else tuple(value)
