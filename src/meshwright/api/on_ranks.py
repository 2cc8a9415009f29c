"""Run a function on several ranks from a script or a notebook's cell."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.environment import launched
from meshwright.errors import BadInput, one_line
from meshwright.launch.function_worker import FunctionTask
from meshwright.launch.launch import launch

WORKER = "meshwright.launch.function_worker"
NOTEBOOK = "__main__"
"""The module of what is defined in a notebook, or in the script that is run."""


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
    """Run a function on new ranks of this machine, and return what each rank returned.

    In the function, `mw.setup` and `mw.parallelize` join the ranks. It works from a notebook's cell, also with
    functions and models that are defined in cells: those are sent by value. If a rank fails, its error is raised here,
    and all ranks have ended.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise BadInput(f"on_ranks({ranks!r}, ...) needs the number of ranks first, a whole number of at least 1.")
    if not callable(function):
        raise BadInput(f"on_ranks({ranks}, ...) needs a function after the number, not {type(function).__name__}.")
    if launched() is not None:
        raise BadInput("on_ranks starts ranks, but this process is a rank already; call the function itself.")
    with tempfile.TemporaryDirectory(prefix="meshwright-function-") as folder:
        task = FunctionTask(call=pickled(function, arguments, named), folder=Path(folder))
        launch(task, ranks, results=[], worker=WORKER)
        return [pickle.loads(task.result(rank).read_bytes()) for rank in range(ranks)]


def pickled(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> bytes:
    """The call for another process; what is defined in `__main__` travels by value."""
    call = (function, arguments, named)
    try:
        import cloudpickle
    except ImportError:
        return _by_reference(call)
    try:
        return bytes(cloudpickle.dumps(call))
    except Exception as error:  # whatever an object's own pickling raises
        raise BadInput(f"{_name(function)} cannot be sent to ranks: {one_line(error)}") from error


def _by_reference(call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> bytes:
    """Pickled with the standard library: functions must be importable by the ranks."""
    function = call[0]
    if getattr(function, "__module__", NOTEBOOK) == NOTEBOOK:
        raise BadInput(
            f"{_name(function)} is defined in a notebook or in the script itself, which ranks cannot import. Install "
            "cloudpickle (pip install 'meshwright[notebook]'), or write the function to a file and import it."
        )
    try:
        return pickle.dumps(call)
    except Exception as error:  # whatever an object's own pickling raises
        raise BadInput(
            f"{_name(function)} cannot be sent to ranks: {one_line(error)} Install cloudpickle "
            "(pip install 'meshwright[notebook]'), or pass importable functions only."
        ) from error


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
