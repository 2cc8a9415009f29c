"""Wrap a strategy's text between its terms."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text


def lines_of(strategy: str, width: int) -> list[str]:
    """As few lines as fit the width; a longer term gets its own line."""
    lines = [""]
    for term in strategy.replace(",", ",\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(term) > width:
            lines.append("")
        lines[-1] += term
    return lines


class Terms:
    """A strategy as a table cell for the terminal."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(lines_of(self._strategy, options.max_width)), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, lines_of(self._strategy, 0)))
        return Measurement(min(longest, options.max_width), min(len(self._strategy), options.max_width))
