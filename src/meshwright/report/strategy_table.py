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
        """By how much columns that wrap can give way."""
        self.columns[self._place].width = None
        widths = [_widths(column, console, options) for column in self.columns if not column.no_wrap]
        return sum(wide - narrow for narrow, wide in widths)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = options.max_width - needed_width(self, console, options)
        terms = self.columns[self._place]
        narrow, wide = _widths(terms, console, options)
        terms.width = max(narrow, min(wide, narrow + left))
        yield from super().__rich_console__(console, options)


def _widths(column: Column, console: Console, options: ConsoleOptions) -> tuple[int, int]:
    """Of the longest word or term, and of all cells as wide as they would like to be."""
    found = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    return max(one.minimum for one in found), max(one.maximum for one in found)


def needed_width(table: Table, console: Console, options: ConsoleOptions) -> int:
    """The width in which no word, number or term is broken."""
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
    table = with_columns(StrategyTable(title, left.index(strategy)), left, right)
    for column in table.columns[len(left) :]:
        column.no_wrap, column.overflow = True, "ellipsis"
    return table


def with_columns(table: AnyTable, left: Sequence[str], right: Sequence[str]) -> AnyTable:
    """The table with left-justified columns, followed by right-justified ones; nothing is cut off where it wraps."""
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", overflow="fold")
    return table
