"""HTML for notebooks: small, escaped, without scripts, legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

PALETTE = ("#3b6fb6", "#d98032", "#4c9f70", "#c46aa0", "#5fa8d3", "#c94f4f", "#b9a13a", "#7d6bb3", "#8a8f98")
SHOWN = 12
"""Rows of a table in a notebook; the rest is one line."""


def block(parts: Iterable[str]) -> str:
    return f'<div style="max-width:100%;overflow-x:auto">{"".join(parts)}</div>'


def paragraph(text: str, *, strong: bool = False) -> str:
    shown = escape(text)
    return f'<p style="margin:0.3em 0">{f"<b>{shown}</b>" if strong else shown}</p>'


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def terms(strategy: str) -> str:
    """A strategy with a frame around each term, which may break between terms only."""
    style = "white-space:nowrap;border:1px solid currentColor;border-radius:4px;padding:0 0.3em;margin-right:0.2em"
    return " ".join(f'<code style="{style}">{escape(term)}</code>' for term in strategy.split(","))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already; heads are text."""
    listed = list(rows)
    cell = 'style="text-align:left;padding:0.15em 0.7em 0.15em 0"'
    head = "".join(f"<th {cell}>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td {cell}>{value}</td>' for value in row)}</tr>" for row in listed[:SHOWN])
    more = paragraph(f"... and {len(listed) - SHOWN} more") if len(listed) > SHOWN else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def records(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of records with the same fields; nested ones are counted."""
    heads = list(rows[0])
    cells = ([_cell(row.get(name)) for name in heads] for row in rows)
    return paragraph(title, strong=True) + table(heads, cells)


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        plain = all(isinstance(one, int | float | str) for one in value)
        return escape(", ".join(map(str, value))) if plain and len(value) <= 4 else f"{len(value)}"
    return escape(
        f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def bar(parts: Mapping[str, float], *, width: int = 240) -> str:
    """A stacked bar; each part tells its name and share when pointed at."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    pieces, left = [], 0.0
    for place, (name, size) in enumerate(parts.items()):
        wide = width * size / total
        tip = f"<title>{escape(name)} {size / total:.0%}</title>"
        fill = PALETTE[place % len(PALETTE)]
        pieces.append(f'<rect x="{left:.1f}" width="{wide:.1f}" height="12" fill="{fill}">{tip}</rect>')
        left += wide
    return f'<svg width="{width}" height="12" role="img">{"".join(pieces)}</svg>'


def lanes(rows: Sequence[Sequence[tuple[str, float, float]]], total: float, kinds: Sequence[str]) -> str:
    """One lane per row with its (kind, start, end) pieces, and a legend of the kinds that occur."""
    wide, high = 700, 22
    seen = [kind for kind in kinds if any(kind == piece[0] for row in rows for piece in row)]
    colour = dict(zip(kinds, PALETTE, strict=False))
    shapes = []
    for number, row in enumerate(rows):
        label = f'<text x="0" y="{number * high + 15}" font-size="11" fill="currentColor">rank {number}</text>'
        shapes.append(label)
        for kind, start, end in row:
            x, width = 60 + wide * start / total, wide * (end - start) / total
            tip = f"<title>{escape(kind)} {(end - start) * 1e3:.2f} ms</title>"
            size = f'x="{x:.1f}" y="{number * high + 3}" width="{max(width, 0.3):.1f}" height="{high - 6}"'
            shapes.append(f'<rect {size} fill="{colour[kind]}">{tip}</rect>')
    mark = '<span style="color:{}">&#9632;</span> {}'
    legend = " &nbsp; ".join(mark.format(colour[kind], escape(kind)) for kind in seen)
    drawn = f'<svg width="{wide + 64}" height="{len(rows) * high}" role="img">{"".join(shapes)}</svg>'
    return f"<div>{legend}</div>{drawn}"
