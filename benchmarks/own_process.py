"""A process for each measurement, which imports while the one before it still builds its model."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

PATIENCE = 240.0
"""Seconds that one measurement may take."""


class NotMeasured(Exception):
    """A measurement that cannot be made here; the message says why."""


class Child:
    """A process for one measurement. It imports everything at once and begins when it is told to.

    So imports take place while the measurement before it is still building its model.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self.begun = False
        self.process = context.Process(target=_in_child, args=(other, function, arguments))
        self.process.start()
        other.close()

    def begin(self) -> None:
        if not self.begun:
            self.pipe.send("begin")
        self.begun = True

    def result(self, patience: float = PATIENCE) -> dict[str, Any]:
        """What the function returns, or why there is nothing."""
        self.begin()
        try:
            if not self.pipe.poll(patience):
                return {"error": f"stopped after {patience:.0f} s"}
            found: dict[str, Any] = self.pipe.recv()
            return found
        except EOFError:
            return {"error": "the process ended without a result"}
        finally:
            self.end()

    def end(self) -> None:
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _in_child(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.recv()
    except EOFError:
        return  # it is not needed
    try:
        pipe.send(function(*arguments))
    except NotMeasured as reason:
        pipe.send({"not_measured": str(reason)})
    except Exception as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}"[:400]})
