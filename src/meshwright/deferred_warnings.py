"""Show warnings of other libraries once, after the result instead of in the middle of it.

Processes that a command starts write theirs to a file, and the command shows them with its own.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def deferred_warnings() -> Iterator[None]:
    """Collect warnings, and print each text once to stderr when the block ends, however it ends."""
    kept: dict[tuple[str, str], str] = {}

    def keep(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        kept.setdefault((category.__name__, str(message)), f"{filename}:{lineno}")

    before = warnings.showwarning
    warnings.showwarning = keep
    try:
        yield
    finally:
        warnings.showwarning = before
        for (category, text), place in kept.items():
            print(f"{place}: {category}: {text}", file=sys.stderr)


def write_warnings(path: Path) -> None:
    """From now on, append this process's warnings to a file instead of printing them."""

    def write(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        with path.open("a") as out:
            out.write(json.dumps([str(message), category.__name__, filename, lineno]) + "\n")

    warnings.showwarning = write


def show_written(path: Path) -> None:
    """Show what another process has written, as if this one had warned."""
    if not path.exists():
        return
    for row in path.read_text(errors="replace").splitlines():
        try:
            text, category, filename, line = json.loads(row)
        except ValueError:  # the process was killed while it wrote
            continue
        warnings.showwarning(text, type(category, (Warning,), {}), filename, line)
