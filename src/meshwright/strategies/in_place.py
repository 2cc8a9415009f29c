"""Recognise torch functions that change an argument in place, and find that argument."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor


def changed_by(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a call changes in place; None if it changes none."""
    if not changes_its_input(func, args, kwargs):
        return None
    target = kwargs.get("out", args[0] if args else None)
    return target if isinstance(target, Tensor) else None


def changes_its_input(func: Any, args: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    if (name.endswith("_") and not name.startswith("__")) or name == "__setitem__" or name in IN_PLACE_OPERATORS:
        return True
    return kwargs.get("out") is not None or has_inplace(func, args, kwargs)


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
