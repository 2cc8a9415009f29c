"""Tables with a column of strategies, which gives way to the others without breaking a term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

ANY_WIDTH = 10_000
AnyTable = TypeVar("AnyTable", bound=Table)


class StrategyTable(Table):
    """A table with a column of `Terms`, which takes what the others leave, but no less than its longest term."""

    def __init__(self, title: str | Text, place: int) -> None:
        super().__init__(title=title, title_justify="left")
        self._place = place

    def spare(self, console: Console, options: ConsoleOptions) -> int:
        """By how much strategies can give way."""
        self._terms.width = None
        narrow, wide = self._widths(console, options)
        return wide - narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = needed_width(self, console, options)
        narrow, wide = self._widths(console, options)
        self._terms.width = max(narrow, min(wide, narrow + options.max_width - needed))
        yield from super().__rich_console__(console, options)

    @property
    def _terms(self) -> Column:
        return self.columns[self._place]

    def _widths(self, console: Console, options: ConsoleOptions) -> tuple[int, int]:
        """Of the longest term, and of all strategies as wide as they would like to be."""
        cells = [self._terms.header, *self._terms.cells]
        found = [Measurement.get(console, options, cell) for cell in cells]
        return max(one.minimum for one in found), max(one.maximum for one in found)


def needed_width(table: Table, console: Console, options: ConsoleOptions) -> int:
    """The width in which all columns are whole, and strategies are broken between all terms."""
    spare = table.spare(console, options) if isinstance(table, StrategyTable) else 0
    return Measurement.get(console, options.update(max_width=ANY_WIDTH), table).maximum - spare


class FirstThatFits:
    """The first of some tables whose columns are all whole in this window; the last if none is."""

    def __init__(self, *tables: Table) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitting = (table for table in self._tables if needed_width(table, console, options) <= options.max_width)
        yield next(fitting, self._tables[-1])


def strategy_table(
    title: str | Text, left: Sequence[str], right: Sequence[str] = (), *, strategy: str = "strategy"
) -> StrategyTable:
    """Left-justified columns, of which `strategy` holds `Terms`, followed by right-justified ones."""
    return with_columns(StrategyTable(title, left.index(strategy)), left, right)


def with_columns(table: AnyTable, left: Sequence[str], right: Sequence[str]) -> AnyTable:
    """The table with left-justified columns, followed by right-justified ones."""
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table
