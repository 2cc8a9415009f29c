"""Progress bars for long work, on stderr if it is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar for work on `total` bytes; yields a function to call with the bytes just finished."""
    console = Console(stderr=True)
    columns = (
        *(SpinnerColumn(), TextColumn("{task.description}"), BarColumn()),
        *(DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeElapsedColumn()),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)
