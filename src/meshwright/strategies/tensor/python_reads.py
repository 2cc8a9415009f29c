"""What a block's Python code reads and changes beside tensors: the state that a recorded program depends on.

A program leaves the model's Python code out, so it is right only while that code would do the same again. The code that
ran is known (`sys.setprofile`), and so are the globals that it names and the attributes of modules and other objects in
reach. All of them are written down as checks; a call for which one fails does not run the program. State that
cannot be compared, and code whose results nobody can foresee (clocks, random numbers of Python), is refused.
"""

from __future__ import annotations

import dis
import enum
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshwright.strategies.tensor.record import Unrecordable

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])
_LIBRARY = str(Path(enum.__file__).parent)
_UNFORESEEN = ("time", "random", "_random", "posix")
_SIMPLE = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size),
)
_FIXED = (FunctionType, BuiltinFunctionType, type, ModuleType, property)
DEEPEST = 4
"""Levels of objects in objects that are compared."""


class PythonReads:
    """Watches the Python code of one call."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._read: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._seen: set[CodeType] = set()

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

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if getattr(arg, "__module__", None) in _UNFORESEEN and is_of_model(frame.f_code):
                self.reason = self.reason or f"{arg.__module__}.{arg.__name__} is called"
        elif event == "call" and frame.f_code not in self._seen:
            self._seen.add(frame.f_code)
            if is_of_model(frame.f_code):
                self._inspect(frame)

    def _inspect(self, frame: FrameType) -> None:
        names, changes = _names(frame.f_code)
        if changes:
            self.reason = self.reason or f"{frame.f_code.co_qualname} changes the variable {changes} outside of itself"
        for chain in names:
            self._follow(frame.f_globals, chain)
        for name in frame.f_code.co_freevars:
            if isinstance(frame.f_locals.get(name), Tensor | list | dict | set):
                self.reason = self.reason or f"{frame.f_code.co_qualname} reads {name} of the function around it"

    def _follow(self, space: dict[str, Any], chain: tuple[str, ...]) -> None:
        """Note what `a.b.c` reads, as far as each is kept in the dict of the one before."""
        for name in chain:
            if name not in space:
                return
            value = space[name]
            if not isinstance(value, ModuleType):
                self._read[id(space), name] = space, value
            elif value.__name__.partition(".")[0] == "torch":
                return
            inner = getattr(value, "__dict__", None)
            if not isinstance(inner, dict):
                return
            space = inner


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
    elif isinstance(value, MethodType | partial):
        yield "{0} is {1}", value
    elif isinstance(value, tuple | list | dict) and depth < DEEPEST:
        yield "{0} is {1}", value
        yield "len({0}) == {1}", len(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if type(key) in (str, int):
                yield from _inner(f"{{0}}[{key!r}]", item, depth)
    elif hasattr(value, "__dict__") and depth < DEEPEST:
        yield "{0} is {1}", value
        if is_comparable(vars(value)):
            yield "{0}.__dict__ == {1}", copied(vars(value))
            return
        yield "len({0}.__dict__) == {1}", len(vars(value))
        for name, item in vars(value).items():
            yield from _inner(f"{{0}}.__dict__[{name!r}]", item, depth)
    else:
        raise Unrecordable(f"it holds a {kind.__name__} that cannot be compared")


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
