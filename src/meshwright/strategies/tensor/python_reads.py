"""What a block's Python code reads and changes beside tensors: the state that a recorded program depends on.

A program leaves the model's Python code out, so it is right only while that code would do the same again. The code that
ran is known (`sys.setprofile`), and so are the globals and the variables of enclosing functions that it names, and the
attributes of modules and other objects in reach. All of them are written down as checks; a call for which one fails
does not run the program. State that cannot be compared, and code whose results nobody can foresee (clocks, files, the
environment, context variables, torch's switches, random numbers of Python), is refused.
"""

from __future__ import annotations

import dis
import enum
import gc
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from logging import Logger
from operator import getitem
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GenericAlias,
    MethodType,
    ModuleType,
)
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor, nn

from meshwright.strategies.tensor.record import Unrecordable
from meshwright.torch_private.modules import SETTINGS

_TORCH = str(Path(torch.__file__).parent)
_LAYERS = str(Path(_TORCH, "nn"))
_OURS = str(Path(__file__).parents[2])
_LIBRARY = str(Path(enum.__file__).parent)
_LIBRARIES = sys.stdlib_module_names
_UNFORESEEN = ("time", "random", "_random", "posix", "io", "_io", "_contextvars", "datetime", "_thread")
_ENVIRONMENT = os.__file__
_SWITCHES_SEEN = (
    *("is_grad_enabled", "_set_grad_enabled", "get_default_dtype", "is_autocast_enabled", "_is_tracing"),
    *("is_inference_mode_enabled", "_get_tracing_state"),
)
"""Functions of torch that read switches which a program's state has, or which exclude programs."""
_SIMPLE = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size),
)
_FIXED = (FunctionType, BuiltinFunctionType, type, ModuleType, property)
_WITHOUT_STATE = (Logger, re.Pattern, type(lru_cache(lambda: None)), ContextVar, GenericAlias, TypeVar)
"""Objects that decide nothing, or whose reads are seen as calls."""
DEEPEST = 4
"""Levels of objects in objects that are compared."""


class PythonReads:
    """Watches the Python code of one call."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._read: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._seen: set[CodeType] = set()
        self._enclosed: list[tuple[CodeType, dict[str, Any]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        drawn = _random_states()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
        if _random_states() != drawn:
            self.reason = self.reason or "it draws random numbers of Python or numpy"

    def globals_read(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Globals that the code names, and attributes of global objects: the dict that holds each, name and value."""
        for (_, name), (space, value) in self._read.items():
            yield space, name, value

    def enclosing_variables(self) -> Iterator[tuple[CellType, Any]]:
        """The variables of enclosing functions that the code reads, and their values."""
        inside = {const for code in self._seen for const in code.co_consts if isinstance(const, CodeType)}
        read = [(code, values) for code, values in self._enclosed if code not in inside]  # not made in this call
        made = _functions_of({code for code, _ in read}) if read else []
        for code, values in read:
            closures = [cells for function in made if (cells := _closure(function, code, values)) is not None]
            if not closures:
                raise Unrecordable(f"{code.co_qualname} reads variables of the function around it")
            for cells in closures:
                yield from ((cells[name], value) for name, value in values.items())

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            self._check_call(frame, arg)
        elif event == "call" and frame.f_code not in self._seen:
            self._seen.add(frame.f_code)
            if is_of_model(frame.f_code):
                self._inspect(frame)
            elif frame.f_code.co_filename == _ENVIRONMENT:
                self._refuse("it reads the environment")

    def _check_call(self, caller: FrameType, called: Any) -> None:
        owner = getattr(called, "__self__", None)
        if owner is SETTINGS:
            known = called.__name__ in _SWITCHES_SEEN or called.__name__.startswith("_has_torch_function")
            if not known and _asked_by_model(caller):
                self._refuse(f"{called.__name__} asks for a setting of torch")
        elif is_of_model(caller.f_code):
            source = owner if isinstance(owner, type) else type(owner)
            module = getattr(called, "__module__", None) or getattr(source, "__module__", None)
            if module in _UNFORESEEN or isinstance(owner, ContextVar):
                self._refuse(f"{module}.{called.__name__} is called")

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _inspect(self, frame: FrameType) -> None:
        names, changes = _names(frame.f_code)
        if changes:
            self._refuse(f"{frame.f_code.co_qualname} changes the variable {changes} outside of itself")
        for chain in names:
            self._follow(frame.f_globals, chain)
        if frame.f_code.co_freevars:
            values = frame.f_locals
            self._enclosed.append((frame.f_code, {n: values[n] for n in frame.f_code.co_freevars if n in values}))

    def _follow(self, space: Any, chain: tuple[str, ...]) -> None:
        """Note what `a.b.c` reads, as far as each is kept in the dict of the one before, or of its class."""
        for name in chain:
            if name not in space:
                return
            value = space[name]
            if not isinstance(value, ModuleType):
                self._read[id(space), name] = space, value
            elif value.__name__.partition(".")[0] == "torch":
                return
            if isinstance(value, type):
                space = next((vars(cls) for cls in value.__mro__ if chain[-1] in vars(cls)), vars(value))
            elif isinstance(inner := getattr(value, "__dict__", None), dict):
                space = inner
            else:
                return


def _asked_by_model(frame: FrameType) -> bool:
    """Whether a model's code, or a function of torch that it calls, asks torch for a setting."""
    if is_of_model(frame.f_code):
        return True
    above = frame.f_back
    own = frame.f_code.co_filename
    return own.startswith(_TORCH) and not own.startswith(_LAYERS) and above is not None and is_of_model(above.f_code)


def _functions_of(codes: set[CodeType]) -> list[FunctionType]:
    return [found for found in gc.get_referrers(*codes) if isinstance(found, FunctionType) and found.__code__ in codes]


def _closure(function: FunctionType, code: CodeType, values: dict[str, Any]) -> dict[str, CellType] | None:
    """A function's variables of enclosing functions, if it is the one with this code that had these values."""
    if function.__code__ is not code:
        return None
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    try:
        same = all(cells[name].cell_contents is value for name, value in values.items())
    except ValueError:  # a cell that has no value yet
        return None
    return cells if same else None


def _random_states() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators."""
    of_numpy: Any = numpy.random.get_state()
    return random.getstate(), of_numpy[1].tobytes(), of_numpy[2]


def is_of_model(code: CodeType) -> bool:
    """Whether code is the model author's, and neither torch's, ours, nor Python's own."""
    file = code.co_filename
    if file.startswith((_TORCH, _OURS, "<")):
        return False
    return not file.startswith(_LIBRARY) or "-packages" in file


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[tuple[tuple[str, ...], ...], str]:
    """The globals that code reads, with the attributes read from them, and a variable outside of itself it changes."""
    read: dict[tuple[str, ...], None] = {}
    changed = ""
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (str(step.argval),)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, str(step.argval))
        elif step.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL"):
            chain = ()
        if chain:
            read[chain] = None
        captured = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        if captured or step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            changed = changed or str(step.argval)
    return tuple(read), changed


Check = tuple[str, Any]
"""A template over `{}`, the expression that reads a value, and the constant that it compares with."""


def checks_of(value: Any, depth: int = 0) -> Iterator[Check]:
    """Expressions that are true while a value is what it is now. `{0}` reads it and `{1}` is the constant."""
    kind = type(value)
    if value is None or kind is bool:
        yield "{0} is {1}", value
    elif kind in _SIMPLE or isinstance(value, enum.Enum):
        yield "({0} is {1} or ({0}.__class__ is {1}.__class__ and {0} == {1}))", value
    elif isinstance(value, (*_FIXED, Tensor)):
        yield "{0} is {1}", value
    elif isinstance(value, nn.Module):
        yield "{0} is {1}", value  # its attributes are compared if it is part of the block
    elif kind in (tuple, list, dict, set, frozenset) and is_comparable(value):
        yield "{0} == {1}", copied(value)
    elif isinstance(value, (MethodType, partial, *_WITHOUT_STATE)):
        yield "{0} is {1}", value
    elif isinstance(value, tuple | list | dict) and depth < DEEPEST:
        yield "{0} is {1}", value
        yield "len({0}) == {1}", len(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if type(key) in (str, int):
                yield from _inner(f"{{0}}[{key!r}]", item, depth)
    elif hasattr(value, "__dict__") and depth < DEEPEST:
        yield "{0} is {1}", value
        if of_class := class_state(kind):
            yield "{1}.same()", of_class
        if is_comparable(vars(value)):
            yield "{0}.__dict__ == {1}", _shared(kind, copied(vars(value)))
            return
        yield "len({0}.__dict__) == {1}", len(vars(value))
        for name, item in vars(value).items():
            yield from _inner(f"{{0}}.__dict__[{name!r}]", item, depth)
    else:
        raise Unrecordable(f"it holds a {kind.__name__} that cannot be compared")


_latest: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()


def _shared(kind: type, state: dict[str, Any]) -> dict[str, Any]:
    """An object's state, or the latest equal one: what all blocks compare with, as their config, stays in caches."""
    known = _latest.get(kind)
    if known != state:
        known = _latest[kind] = state
    return known


@dataclass(frozen=True, eq=False)
class ClassState:
    """Settings that objects of a class share."""

    owners: tuple[type, ...]
    """The class or base that has each of them."""
    spaces: tuple[Any, ...]
    """Its attributes."""
    names: tuple[str, ...]
    values: tuple[Any, ...]

    def same(self) -> bool:
        """It raises KeyError if one is missing."""
        return (*map(getitem, self.spaces, self.names),) == self.values


_latest_classes: WeakKeyDictionary[type, ClassState] = WeakKeyDictionary()


def class_state(cls: type) -> ClassState | None:
    """The comparable attributes of a class and its bases; None if it has none, and for classes of Python and torch."""
    own = [one for one in cls.__mro__ if one.__module__.partition(".")[0] not in ("builtins", "torch", *_LIBRARIES)]
    found = [
        (one, vars(one), name, copied(value))
        for one in own
        for name, value in vars(one).items()
        if not name.startswith("__") and not isinstance(value, _FIXED) and is_comparable(value)
    ]
    if not found:
        return None
    made = ClassState(*zip(*found, strict=True))
    known = _latest_classes.get(cls)  # shared, as the state of objects is
    if known is None or (known.owners, known.names, known.values) != (made.owners, made.names, made.values):
        known = _latest_classes[cls] = made
    return known


def _inner(place: str, item: Any, depth: int) -> Iterator[Check]:
    for text, constant in checks_of(item, depth + 1):
        yield text.replace("{0}", place), constant


def is_comparable(value: Any) -> bool:
    """Whether a value consists of plain containers and simple values, so that `==` compares all of it."""
    kind = type(value)
    if kind in _SIMPLE or isinstance(value, (enum.Enum, *_FIXED)):
        return True
    if kind in (tuple, list, set, frozenset):
        return all(map(is_comparable, value))
    return kind is dict and all(map(is_comparable, value)) and all(map(is_comparable, value.values()))


def copied(value: Any) -> Any:
    kind = type(value)
    if kind in (tuple, list, set, frozenset):
        return kind(map(copied, value))
    return {key: copied(item) for key, item in value.items()} if kind is dict else value
