"""Functions inside of other callables, and the variables that they enclose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from meshwright.strategies.tensor.object_state import CACHED


def function_in(value: Any) -> Any:
    """The function in a method or property of any kind, or in a function that binds another or caches its results."""
    names = {property: "fget", partial: "func", CACHED: "__wrapped__"}
    kinds = (staticmethod, classmethod, MethodType)
    name = "__func__" if isinstance(value, kinds) else names.get(type(value))
    return value if name is None else function_in(getattr(value, name))


def functions_below(values: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions among values, and those in the variables that these enclose, as a decorator's do."""
    waiting, seen = [*values], set[int]()
    while waiting:
        function = function_in(waiting.pop())
        if isinstance(function, FunctionType) and id(function) not in seen:
            seen.add(id(function))
            yield function
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # a cell that has no value yet
                    waiting.append(cell.cell_contents)


def closure_of(function: FunctionType, code: CodeType, values: dict[str, Any]) -> dict[str, CellType] | None:
    """A function's variables of enclosing functions, if it is the one with this code that had these values."""
    if function.__code__ is not code:
        return None
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    try:
        same = all(cells[name].cell_contents is value for name, value in values.items())
    except ValueError:  # a cell that has no value yet
        return None
    return cells if same else None
