"""A timeline as a figure: one row per rank, a box for each piece of work, and sends as thin lines below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.facts.timeline import IDLE, KINDS, SEND, Piece, Timeline
from meshwright.report.charts import ZOOMABLE, Key, Plot, Values, axis, plain, shared_layout
from meshwright.report.colours import DARK, WORK, variable
from meshwright.units import show_seconds

ROW, ABOVE, BELOW = 44, 30, 30
"""Pixels of a rank's row, of the buttons above, and of the axis."""
GAP = 0.04
"""Share of the width that marks an omitted part."""
LEAST_OMITTED = 0.4
"""The smallest share of a step that is worth omitting."""
WORK_WIDTH, SEND_WIDTH, SEND_BELOW = 0.66, 0.12, 0.41
"""Shares of a rank's row; sends are drawn below its middle."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A time range, and its position in the figure."""

    start: float
    end: float
    domain: tuple[float, float]
    """Shares of the figure's width."""

    def shows(self, piece: Piece) -> bool:
        return piece.end > self.start and piece.start < self.end


def windows(timeline: Timeline, drawn: int) -> tuple[Window, ...]:
    """The whole step, or its start and end if it has many more pieces than `drawn`."""
    share = drawn / max(1, len(timeline.pieces)) / 2
    if 2 * share >= 1 - LEAST_OMITTED:
        return (Window(start=0.0, end=timeline.total or 1.0, domain=(0.0, 1.0)),)
    total, width = timeline.total, (1 - GAP) / 2
    return (
        Window(start=0.0, end=total * share, domain=(0.0, width)),
        Window(start=total * (1 - share), end=total, domain=(1 - width, 1.0)),
    )


def left_out(timeline: Timeline, drawn: int) -> float:
    """Seconds omitted between the windows."""
    found = windows(timeline, drawn)
    return found[-1].start - found[0].end if len(found) > 1 else 0.0


def timeline_plot(timeline: Timeline, drawn: int) -> Plot:
    """The figure; time is in milliseconds."""
    shown = windows(timeline, drawn)
    kinds = [kind for kind in KINDS if any(piece.kind == kind for piece in timeline.pieces)]
    return Plot(
        words=_words(timeline),
        data=[_trace(timeline, kind, place, window) for kind in kinds for place, window in enumerate(shown)],
        layout=_layout(timeline, shown),
        legends=(("", tuple(_keys(kinds, len(shown)))),),
        config=ZOOMABLE,
    )


def _words(timeline: Timeline) -> str:
    """Description of the timeline for screen readers."""
    idle = "; ".join(f"rank {rank} idle {_idle(timeline, rank)}" for rank in range(timeline.ranks))
    return f"Timeline of {timeline.strategy}, {timeline.origin}, {show_seconds(timeline.total)}: {idle}"


def _idle(timeline: Timeline, rank: int) -> str:
    waited = sum(piece.seconds for piece in timeline.of(rank) if piece.kind == IDLE)
    return f"{waited / timeline.total if timeline.total else 0.0:.1%}"


def _trace(timeline: Timeline, kind: str, place: int, window: Window) -> Values:
    """All pieces of one kind in one window. Micro-batches alternate in shade."""
    pieces = [piece for piece in timeline.pieces if piece.kind == kind and window.shows(piece)]
    is_send, colour = kind == SEND, WORK[kind]
    opacities = [0.7 if (piece.micro_batch or 0) % 2 else 1.0 for piece in pieces]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "xaxis": f"x{place + 1}" if place else "x",
        "base": [1e3 * piece.start for piece in pieces],
        "x": [1e3 * piece.seconds for piece in pieces],
        "y": [piece.rank + (SEND_BELOW if is_send else 0.0) for piece in pieces],
        "width": SEND_WIDTH if is_send else WORK_WIDTH,
        "marker": {"color": variable(colour), "opacity": opacities},
        "text": ["" if is_send or piece.micro_batch is None else str(piece.micro_batch) for piece in pieces],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"size": 11, "color": "#fff" if colour in DARK else "#111"},
        "hoverinfo": "text",
        "hovertext": ["<br>".join(plain(line) for line in piece_lines(piece)) for piece in pieces],
    }


def piece_lines(piece: Piece) -> list[str]:
    """A piece with its exact figures."""
    subject = f"{piece.kind[:1].upper()}{piece.kind[1:]}"
    about = f" of micro-batch {piece.micro_batch}, stage {piece.stage}" if piece.micro_batch is not None else ""
    target = [f"rank {piece.rank} to rank {piece.to}" if piece.to is not None else f"rank {piece.rank}"]
    parts = [f"{cause} {1e3 * seconds:,.3f} ms" for cause, seconds in piece.parts.items()]
    when = f"from {1e3 * piece.start:,.3f} to {1e3 * piece.end:,.3f} ms"
    return [f"{subject}{about}", *target, f"{1e3 * piece.seconds:,.3f} ms", when, *parts]


def _layout(timeline: Timeline, shown: tuple[Window, ...]) -> Values:
    ranks, axes = range(timeline.ranks), {}
    for place, window in enumerate(shown):
        start, end = 1e3 * window.start, 1e3 * window.end
        name = f"xaxis{place + 1 if place else ''}"
        axes[name] = axis("ms", domain=list(window.domain), range=[start, end], minallowed=start, maxallowed=end)
    return shared_layout(
        timeline.ranks * ROW + ABOVE + BELOW,
        barmode="overlay",
        dragmode="zoom",
        margin={"l": 68, "r": 12, "t": ABOVE, "b": BELOW},
        uniformtext={"mode": "hide", "minsize": 10},
        yaxis={
            "fixedrange": True,
            "range": [timeline.ranks - 0.4, -0.5],
            "tickvals": list(ranks),
            "ticktext": [f"rank {rank}<br>idle {_idle(timeline, rank)}" for rank in ranks],
            "showgrid": False,
            "zeroline": False,
        },
        annotations=[_dots(rank) for rank in ranks] if len(shown) > 1 else [],
        **axes,
    )


def _dots(rank: int) -> Values:
    """Marks the omitted part of a row."""
    return {"xref": "paper", "x": 0.5, "yref": "y", "y": rank, "text": "⋯", "showarrow": False, "font": {"size": 16}}


def _keys(kinds: list[str], count: int) -> Iterator[Key]:
    for number, kind in enumerate(kinds):
        yield Key(label=kind, colour=WORK[kind], traces=tuple(range(number * count, (number + 1) * count)))
