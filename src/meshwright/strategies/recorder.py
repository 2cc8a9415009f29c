"""The recorder that is active while a block's local program is recorded, and what tells it about our own functions.

Collectives and other functions of ours are autograd functions, which no mode sees. `noted` runs such a function and, if
a recorder is active, has it written down as one instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol


class Recorder(Protocol):
    def note(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a function of ours and write it down."""

    def alias(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a function that returns its first argument in another form."""

    def refuse(self, reason: str) -> None:
        """Give up recording; the call goes on."""


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
