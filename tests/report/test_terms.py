"""Strategies break between their terms, and nothing of them is cut off."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from meshwright.report.terms import Terms, lines_of

LONG = "zero1=16,tp=4,pp=2:interleaved,bf16,ac=full,mb=2"


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (80, [LONG]),
        (24, ["zero1=16,tp=4,", "pp=2:interleaved,bf16,", "ac=full,mb=2"]),
        (5, ["zero1=16,", "tp=4,", "pp=2:interleaved,", "bf16,", "ac=full,", "mb=2"]),
    ],
)
def test_lines(width: int, expected: list[str]) -> None:
    assert lines_of(LONG, width) == expected


@pytest.mark.parametrize("width", [20, 40, 60, 100])
def test_a_table_of_any_width_has_all_of_it(width: int) -> None:
    table = Table("strategy", "what it takes")
    table.add_row(Terms(LONG), "a second and a half")
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    rows = [line.split("│") for line in console.export_text().splitlines() if line.count("│") == 3]
    assert "".join(row[1].strip() for row in rows) == LONG
