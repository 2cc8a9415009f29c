"""A block's local program: the functions and collectives that one call ran on plain local tensors, as a list.

A program prints as Python source, which is how it runs: nothing is decided or looked up between two functions. Equal
programs share their code, whatever blocks they were recorded from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from types import CodeType
from typing import Any

import torch


@dataclass(frozen=True)
class Local:
    """A tensor of the program by its number: inputs first, then what modules hold, then results."""

    number: int

    def __repr__(self) -> str:
        return f"v{self.number}"


@dataclass(frozen=True)
class Instruction:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Constants and `Local`s, in tuples, lists, dicts and slices."""
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    """Numbers of the tensors that it returns."""
    single: bool
    """Whether it returns a tensor, and not a sequence of them."""
    differentiated: bool
    """Whether gradients were recorded, in a program that has some."""


@dataclass(frozen=True)
class Program:
    inputs: tuple[int, ...]
    """Numbers of the tensors that it gets: from its arguments, then from modules."""
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    shapes: Mapping[int, tuple[int, ...]]
    """The shape of each tensor, by number."""

    def next_number(self) -> Iterator[int]:
        """Numbers that no tensor has."""
        return count(max(self.shapes, default=-1) + 1)

    def compile(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """A function of the inputs that returns the outputs."""
        constants: dict[str, Any] = {"no_grad": torch.no_grad}
        source = "\n".join(self._lines(constants))
        return _bind(_compiled(source), constants)  # type: ignore[no-any-return]

    def identity(self) -> Any:
        """Equal for programs that do the same."""
        constants: dict[str, Any] = {}
        lines = tuple(self._lines(constants))
        return lines, tuple((name, type(value), value) for name, value in constants.items())

    def same_as(self, other: Program) -> bool:
        mine: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        if [*self._lines(mine)] != [*other._lines(theirs)]:
            return False
        return all(_same_constant(value, theirs[name]) for name, value in mine.items())

    def _lines(self, constants: dict[str, Any]) -> Iterator[str]:
        yield f"def run({', '.join(f'v{number}' for number in self.inputs)}):"
        last = self._last_uses()
        for place, one in enumerate(self.instructions):
            yield f"    {'' if one.differentiated else 'with no_grad(): '}{_line(one, constants)}"
            if dead := sorted(last.get(place, ())):
                yield f"    {' = '.join(f'v{number}' for number in dead)} = None"
        yield f"    return ({''.join(f'v{number}, ' for number in self.outputs)})"

    def _last_uses(self) -> dict[int, set[int]]:
        """The tensors that no instruction after a place needs, by the place: they are freed as in a plain run."""
        last = dict.fromkeys(self.inputs, 0)
        for place, one in enumerate(self.instructions):
            last |= dict.fromkeys(one.results, place)
            last |= {local.number: place for local in locals_in((one.args, one.kwargs))}
        by_place: dict[int, set[int]] = {}
        for number, place in last.items():
            if number not in self.outputs:
                by_place.setdefault(place, set()).add(number)
        return by_place


def _line(one: Instruction, constants: dict[str, Any]) -> str:
    words = [_text(value, constants) for value in one.args]
    words += [f"{key}={_text(value, constants)}" for key, value in one.kwargs.items()]
    call = f"{_constant(one.function, constants)}({', '.join(words)})"
    if not one.results:
        return call
    names = ", ".join(f"v{number}" for number in one.results)
    return f"{names if one.single else f'({names},)'} = {call}"


_PLAIN = (bool, int, float, str, type(None), type(Ellipsis))


def _text(value: Any, constants: dict[str, Any]) -> str:
    if isinstance(value, Local):
        return repr(value)
    kind = type(value)
    if kind in (bool, int, str) or value is None or value is Ellipsis:
        return repr(value)
    if kind is tuple:
        return f"({''.join(f'{_text(item, constants)}, ' for item in value)})"
    if kind is list:
        return f"[{', '.join(_text(item, constants) for item in value)}]"
    if kind is dict:
        return f"{{{', '.join(f'{key!r}: {_text(item, constants)}' for key, item in value.items())}}}"
    if kind is slice:
        return f"slice({', '.join(_text(item, constants) for item in (value.start, value.stop, value.step))})"
    return _constant(value, constants)


def _constant(value: Any, constants: dict[str, Any]) -> str:
    for name, known in constants.items():
        if known is value:
            return name
    name = f"c{len(constants)}"
    constants[name] = value
    return name


def _same_constant(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b)) or (a != a and b != b)


def locals_in(tree: Any) -> Iterator[Local]:
    if isinstance(tree, Local):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from locals_in(item)
    elif isinstance(tree, dict):
        yield from locals_in(tuple(tree.values()))
    elif isinstance(tree, slice):
        yield from locals_in((tree.start, tree.stop, tree.step))


@lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, "<tensor program>", "exec")


def _bind(code: CodeType, constants: dict[str, Any]) -> Any:
    made: dict[str, Any] = dict(constants)
    exec(code, made)
    return made["run"]
