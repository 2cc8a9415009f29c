"""Strategies in the terminal: they break between their terms, never inside one."""

from __future__ import annotations

import re

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import StyleType
from rich.text import Text

SHARE = 3 / 8
"""The share of a window that a strategy takes in a table, unless one term is longer."""


def lines_of(strategy: str, width: int) -> list[str]:
    """As few lines as fit the width; a longer term gets its own line."""
    lines = [""]
    for term in strategy.replace(",", ",\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(term) > width:
            lines.append("")
        lines[-1] += term
    return lines


class Terms:
    """A strategy as a cell of a `StrategyTable`, optionally with a dim note below it."""

    def __init__(self, strategy: str, note: str = "") -> None:
        self._strategy = strategy
        self._note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(lines_of(self._strategy, options.max_width)), overflow="fold")
        if self._note:
            yield from console.render(Text(self._note, style="dim"), options.update(no_wrap=False))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, lines_of(self._strategy, 0)))
        room = max(longest, int(console.width * SHARE))
        widest = max(*map(len, lines_of(self._strategy, room)), min(len(self._note), room))
        return Measurement(min(longest, options.max_width), min(widest, options.max_width))


class Prose:
    """Sentences that may hold strategies; a strategy longer than a line breaks between terms."""

    def __init__(self, text: str, style: StyleType = "", *, lead: str = "") -> None:
        self._text = text
        self._style = style
        self._lead = lead

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown = Text(break_strategies(self._lead, width), style="bold")
        yield shown.append(break_strategies(self._text, width), style=f"not bold {self._style}")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        whole = f"{self._lead}{self._text}"
        longest = max((len(term) for word in whole.split() for term in lines_of(word, 0)), default=0)
        widest = max(map(len, whole.split("\n")))
        return Measurement(min(longest, options.max_width), min(widest, options.max_width))


def break_strategies(text: str, width: int) -> str:
    """The text with line breaks between the terms of strategies that are longer than a line."""
    return re.sub(r"\S+", lambda word: "\n".join(lines_of(word[0], width)) if len(word[0]) > width else word[0], text)
