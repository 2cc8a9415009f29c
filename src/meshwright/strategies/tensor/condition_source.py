"""Conditions as Python source: collects them, and compiles them to one function that checks all of them.

Hundreds of attributes, globals and methods are the objects that they were when a block was recorded, in all calls but
few. So the function first compares them by identity, all of them in one loop without Python code; only if one of them
is another object are they compared by value, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter, getitem, is_
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from meshwright.strategies.tensor.object_state import checks_of
from meshwright.strategies.tensor.record import PLAIN, Unrecordable

_metadata = attrgetter("__class__", "dtype", "shape", "requires_grad", "device")
_body = attrgetter("__code__", "__defaults__")
_TOOLS: dict[str, Any] = {
    "getitem": getitem,
    "is_": is_,
    "metadata": _metadata,
    "stride": Tensor.stride,
    "body": _body,
}
"""Names that conditions use beside their constants."""


@dataclass
class _Identities:
    """Items of dicts, types of objects and lengths of containers that are to be what they were."""

    spaces: list[Mapping[str, Any]] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    typed: list[Any] = field(default_factory=list)
    types: list[type] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    empty_spaces: list[Mapping[str, Any]] = field(default_factory=list)
    empty_keys: list[str] = field(default_factory=list)
    """Items that are empty containers, most of what modules have: their number is compared, not their identity."""


class Conditions:
    """Collects conditions and compiles them."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}
        self._by_value: dict[str, None] = {}
        """Conditions on items that are compared by identity first."""
        self._same = _Identities()
        self._constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._objects: set[int] = set()
        """Objects whose attributes are compared already, however they are read."""

    def bind(self, value: Any) -> str:
        """The name of a constant in the source."""
        if id(value) not in self._names:
            self._names[id(value)] = f"c{len(self._constants)}"
            self._constants[self._names[id(value)]] = value
        return self._names[id(value)]

    def require(self, condition: str) -> None:
        self._lines[f"if not ({condition}): return None"] = None

    def assign(self, name: str, read: str) -> None:
        self._lines[f"{name} = {read}"] = None

    def keep(self, read: str, value: Any) -> None:
        """Require that the expression `read` gives what `value` is now."""
        for condition in self._checks(read, value):
            self.require(condition)

    def keep_item(self, space: Mapping[str, Any], key: str, value: Any) -> None:
        """Require that a dict's item is what it is now."""
        read = f"{self.bind(space)}[{key!r}]"
        constant = next(checks_of(value))[1]
        first, *others = self._checks(read, value)
        if constant is value:  # the same object has the same value
            self._compare(space, key, value, first)
        else:
            self.require(first)
        for condition in others:
            self.require(condition)

    def keep_identity(self, space: Mapping[str, Any], key: str, value: Any) -> None:
        """Require that a dict's item is this very object."""
        self._compare(space, key, value, f"{self.bind(space)}[{key!r}] is {self.bind(value)}")

    def keep_empty(self, space: Mapping[str, Any], key: str) -> None:
        """Require that a dict's item is an empty container, this one or another."""
        self._same.empty_spaces.append(space)
        self._same.empty_keys.append(key)

    def keep_functions(self, functions: Sequence[FunctionType]) -> None:
        """Require that functions have the code and the default arguments that they have now."""
        if functions:
            found = self.bind([_body(function) for function in functions])
            self.require(f"[*map(body, {self.bind(functions)})] == {found}")
        for function in functions:
            for kind in ("__defaults__", "__kwdefaults__"):
                if (value := getattr(function, kind)) and not (kind == "__defaults__" and all(map(_is_simple, value))):
                    self.keep(f"{self.bind(function)}.{kind}", value)

    def keep_type(self, value: Any) -> None:
        self._same.typed.append(value)
        self._same.types.append(type(value))

    def keep_length(self, container: Any) -> None:
        self._same.containers.append(container)
        self._same.lengths.append(len(container))

    def keep_tensors(self, names: Sequence[str], values: Sequence[Tensor]) -> None:
        """Require plain tensors with the metadata of `values`, in one loop."""
        for value in values:
            _refuse_subclass(value)
        if values:
            found, read = self.bind([_metadata(value) for value in values]), f"({', '.join(names)},)"
            strides = self.bind([value.stride() for value in values])
            self.require(f"[*map(metadata, {read})] == {found}")
            self.require(f"[*map(stride, {read})] == {strides}")

    def compile(self, returned: str) -> Callable[..., Any]:
        """A function of (args, kwargs). It may raise KeyError, AttributeError and the like if something differs."""
        lines = (*self._identities(), *self._lines, f"return {returned}")
        made = {**_TOOLS, **self._constants, "__source__": lines}
        exec(_compiled("def match(args, kwargs):\n    " + "\n    ".join(lines)), made)
        return made["match"]  # type: ignore[no-any-return]

    def _checks(self, read: str, value: Any) -> list[str]:
        """Conditions that `read` gives `value`, and that an object is in its state, once for all reads of it."""
        checks = list(checks_of(value))
        name = self.bind(value)
        found = [text.replace("{0}", read).replace("{1}", self.bind(constant)) for text, constant in checks[:1]]
        if len(checks) > 1 and id(value) not in self._objects:
            self._objects.add(id(value))
            found += [text.replace("{0}", name).replace("{1}", self.bind(constant)) for text, constant in checks[1:]]
        return found

    def _compare(self, space: Mapping[str, Any], key: str, value: Any, by_value: str) -> None:
        if by_value in self._by_value:
            return
        same = self._same
        same.spaces.append(space)
        same.keys.append(key)
        same.values.append(value)
        self._by_value[by_value] = None

    def _identities(self) -> list[str]:
        same, bind = self._same, self.bind
        found = []
        if same.typed:
            found.append(f"if not all(map(is_, map(type, {bind(same.typed)}), {bind(same.types)})): return None")
        if same.containers:
            found.append(f"if [*map(len, {bind(same.containers)})] != {bind(same.lengths)}: return None")
        if same.empty_spaces:
            found.append(f"if any(map(getitem, {bind(same.empty_spaces)}, {bind(same.empty_keys)})): return None")
        if same.spaces:
            items = f"map(getitem, {bind(same.spaces)}, {bind(same.keys)})"
            found.append(f"if not all(map(is_, {items}, {bind(same.values)})):")
            found += [f"    if not ({condition}): return None" for condition in self._by_value]
        return found


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _refuse_subclass(value: Tensor) -> None:
    if type(value) not in PLAIN:
        raise Unrecordable(f"it reads a {type(value).__name__}")


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    return compile(source, "<conditions of a tensor program>", "exec")
