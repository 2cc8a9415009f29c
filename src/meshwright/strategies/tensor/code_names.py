"""What code names: the globals that it reads, what it imports as it runs, and variables of others that it changes."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType


@dataclass(frozen=True)
class Import:
    module: str
    level: int
    """The dots of a relative import."""
    names: tuple[str, ...]
    """What is imported from it. Without names the code has the module, and may read whatever it names."""


@dataclass(frozen=True)
class Names:
    read: tuple[tuple[str, ...], ...]
    """Globals, each with the attributes that are read from it: `a.b.c` is ("a", "b", "c")."""
    changed: str
    """A variable outside of itself that the code changes, or ""."""
    imports: tuple[Import, ...]


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
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
    return Names(tuple(read), changed, tuple(_imports(code)))


def _imports(code: CodeType) -> Iterator[Import]:
    before: list[dis.Instruction] = []
    for step in dis.get_instructions(code):
        if step.opname == "EXTENDED_ARG":
            continue
        if step.opname == "IMPORT_NAME":
            level, names = (one.argval for one in before[-2:])  # two constants that the compiler puts there
            yield Import(str(step.argval), level or 0, tuple(names or ()))
        before.append(step)
