"""How a verb ends: exit 0 done, 1 the check failed or a rank did, 2 bad input. One message, no traceback."""

from __future__ import annotations

import json
import signal
import sys
import threading
import traceback
from typing import Any

import typer
from rich.console import Console, RenderableType

from meshwright.errors import MeshwrightError, RankFailed


class Ended(BaseException):
    """SIGTERM came where nobody listens for it; as an exception, so that all is put away on the way out."""


def _end(number: int, frame: object) -> None:
    raise Ended


def main_with_exit_codes(app: typer.Typer) -> int:
    """Run the application; every error becomes a message on stderr and an exit code."""
    # Before there are ranks there is nothing to save; `train` takes the signal itself as soon as there is.
    main = threading.current_thread() is threading.main_thread()  # elsewhere Python takes no handlers
    before = signal.signal(signal.SIGTERM, _end) if main else None
    try:
        app()
    except Ended:
        print("ended by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except SystemExit as done:  # typer's own way to end, also for a wrong option
        return done.code if isinstance(done.code, int) else 1
    except MeshwrightError as error:
        return _tell(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
    return 0


def print_result(document: Any, page: RenderableType, *, as_json: bool) -> None:
    """The one document on stdout, or a page for people."""
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        Console().print(page)


def _tell(error: MeshwrightError) -> int:
    if isinstance(error, RankFailed) and error.traceback:
        print(f"--- rank {error.rank} ---\n{error.traceback.rstrip()}\n---", file=sys.stderr)
    if "--debug" in sys.argv:
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code
