"""How a verb ends: exit 0 on success, 1 if a check or a rank failed, 2 for bad input. One message, no traceback."""

from __future__ import annotations

import json
import signal
import sys
import threading
import traceback
from contextlib import ExitStack
from typing import Any

import typer
from rich.console import Console, RenderableType

from meshwright.cli.streams import reserved_stdout, result_stream
from meshwright.deferred_warnings import deferred_warnings
from meshwright.errors import MeshwrightError, RankFailed


class Ended(BaseException):
    """SIGTERM outside a training run, raised as an exception so that cleanup runs."""


def _end(number: int, frame: object) -> None:
    raise Ended


def main_with_exit_codes(app: typer.Typer) -> int:
    """Run the application; every error becomes a message on stderr and an exit code."""
    # Before ranks start there is nothing to save; `train` handles the signal itself once they run.
    main = threading.current_thread() is threading.main_thread()  # Python allows handlers only there
    before = signal.signal(signal.SIGTERM, _end) if main else None
    try:
        _run(app)
    except Ended:
        print("ended by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except SystemExit as done:  # how typer exits, also for a wrong option
        return done.code if isinstance(done.code, int) else 1
    except MeshwrightError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
    return 0


def _run(app: typer.Typer) -> None:
    """Run the application; others' warnings come after its result, and under --json stdout is for the result only."""
    with ExitStack() as around:
        around.enter_context(deferred_warnings())
        if "--json" in sys.argv:
            around.enter_context(reserved_stdout())
        app()


def print_result(document: Any, page: RenderableType, *, as_json: bool) -> None:
    """Print the JSON document, or a page for people, to stdout."""
    if as_json:
        print(json.dumps(document, indent=2), file=result_stream(), flush=True)
    else:
        Console().print(page)


def _report(error: MeshwrightError) -> int:
    if isinstance(error, RankFailed) and error.traceback:
        print(f"--- rank {error.rank} ---\n{error.traceback.rstrip()}\n---", file=sys.stderr)
    if "--debug" in sys.argv:
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code
