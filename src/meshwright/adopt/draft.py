"""A job that is being written: the parts of the script, and what was found out on the way."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshwright.adopt.constants import UNKNOWN, evaluate
from meshwright.adopt.flatten import Flat
from meshwright.adopt.kind import Kind
from meshwright.adopt.parts import Parts
from meshwright.adopt.pieces import Collector
from meshwright.adopt.script import Script, argument, is_true, keyword
from meshwright.adopt.slices import stored_names


@dataclass
class Draft:
    """What all writers of a job's functions share."""

    script: Script
    kind: Kind
    flat: Flat
    parts: Parts
    todo: set[tuple[int, str]] = field(default_factory=set)
    """What a person must fill in, with the line of the script."""
    notes: list[str] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)
    """Places of statements before the loop that become settings of the job file."""

    @cached_property
    def given(self) -> set[str]:
        """Names that a job provides in another way, so that no statement is followed through them."""
        return {self.parts.model, self.parts.loader, self.parts.schedule, *self.parts.optimizers} - {""}

    @cached_property
    def collector(self) -> Collector:
        return Collector(self.script, self.flat, self.parts, self.given)

    @property
    def line(self) -> int:
        """The line of the backward pass."""
        return self.parts.backward[0].lineno if self.parts.backward else 1

    @property
    def dataset(self) -> ast.expr | None:
        call = self.parts.loader_call
        return None if call is None else argument(call, 0, "dataset")

    @property
    def drops_last(self) -> bool:
        return self.parts.loader_call is not None and is_true(keyword(self.parts.loader_call, "drop_last"))

    def leave(self, line: int, text: str) -> None:
        """Leave something to the user."""
        self.todo.add((line, text))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def value(self, node: ast.AST | None) -> Any:
        return UNKNOWN if node is None else evaluate(node, self.flat.known, self.script.dotted)

    def share(self, names: set[str]) -> None:
        """Make settings of everything that these names depend on."""
        self.shared |= self.collector.settings(names)

    def stored_in(self, places: Sequence[int]) -> set[str]:
        return {name for one in places for name in stored_names(self.parts.prelude[one])}


def function(name: str, parameters: str, body: Sequence[ast.stmt], ending: str) -> str:
    """A function as text."""
    lines = [line for one in body for line in ast.unparse(ast.fix_missing_locations(one)).splitlines()]
    return "\n".join([f"def {name}({parameters}):", *(f"    {line}" for line in lines), f"    {ending}"])


def raising(name: str, parameters: str) -> str:
    """A function that is left to the user."""
    return f'def {name}({parameters}):\n    raise NotImplementedError("see the list at the top of this file")'
