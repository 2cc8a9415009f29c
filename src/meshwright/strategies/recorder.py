"""The recorder that is active while a block's local program is recorded, and what tells it about our own functions.

Also the choices of a checkpointed region, which must run twice in the same way.

Collectives and other functions of ours are autograd functions, which no mode sees. `noted` runs such a function and, if
a recorder is active, has it written down as one instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class Recorder(Protocol):
    def note(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a function of ours and write it down."""

    def alias(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a function that returns its first argument in another form."""

    def refuse(self, reason: str) -> None:
        """Give up recording; the call goes on."""


SELECTIVE = "selective"
"""What a mode says that must see a program's functions too: it has `hooks` on the tensors that autograd saves."""

active: ContextVar[Recorder | None] = ContextVar("active_recorder", default=None)


def noted(function: Callable[..., Any], *args: Any) -> Any:
    recorder = active.get()
    return function(*args) if recorder is None else recorder.note(function, args)


def aliased(function: Callable[..., Any], *args: Any) -> Any:
    recorder = active.get()
    return function(*args) if recorder is None else recorder.alias(function, args)


def refuse_recording(reason: str) -> None:
    recorder = active.get()
    if recorder is not None:
        recorder.refuse(reason)


class Choices:
    """How blocks ran inside of a checkpointed region: as which program, or as they are. The second run repeats it."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._next: int | None = None

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Region for a run: the first decides, later ones repeat."""
        token = choices.set(self)
        try:
            yield
        finally:
            choices.reset(token)
            self._next = 0

    @property
    def repeats(self) -> bool:
        return self._next is not None

    def add(self, choice: Any) -> None:
        self._made.append(choice)

    def take(self) -> Any:
        assert self._next is not None
        self._next += 1
        return self._made[self._next - 1]


choices: ContextVar[Choices | None] = ContextVar("choices", default=None)
