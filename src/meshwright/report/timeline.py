"""A timeline as a picture: one row a rank, with every place, label and tooltip settled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, log10

from meshwright.facts.timeline import IDLE, KINDS, SEND, Piece, Timeline
from meshwright.units import show_seconds

DRAWN = 600
"""Pieces that a picture shows; of a longer step the middle is left out, which is more of the same."""
GAP = 4.0
"""Per cent of the width that stand for what is left out."""
LEGIBLE = 1.6
"""Per cent of the width that a micro-batch's number needs."""
WORTH = 0.4
"""The least share of a step that is worth leaving out."""
TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Box:
    """One piece of work, or one message."""

    colour: str
    """The style's name for the colour of its kind."""
    x: float
    """Per cent of the picture's width; likewise `width`."""
    width: float
    label: str
    """The micro-batch's number, where there is room for it."""
    words: str
    """The exact figures."""
    is_odd: bool
    """Neighbours that are alike are told apart by a shade."""
    on_link: bool
    """Whether it is under way while the rank computes."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a rank spends on one kind of work, over the whole step."""

    kind: str
    count: int
    seconds: float
    share: float
    """Of the step."""

    @property
    def cells(self) -> tuple[str, ...]:
        each = f"{1e3 * self.seconds / self.count:,.3f} ms"
        return self.kind, f"{self.count:,} times", each, f"{1e3 * self.seconds:,.2f} ms", f"{self.share:.1%}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank of the pipeline."""

    rank: int
    boxes: tuple[Box, ...]
    figures: tuple[Figure, ...]

    @property
    def idle(self) -> str:
        return f"{next((figure.share for figure in self.figures if figure.kind == IDLE), 0.0):.1%}"

    @property
    def words(self) -> str:
        """The row for those who do not see it."""
        told = "; ".join(" ".join(figure.cells) for figure in self.figures)
        return f"Rank {self.rank}, idle {self.idle}: {told}"


@dataclass(frozen=True, kw_only=True)
class Tick:
    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A whole timeline."""

    strategy: str
    note: str
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    colours: dict[str, str]
    """Of the kinds that occur, in the order of KINDS."""
    gap: Tick | None = None
    """Where something was left out, and what."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    """A stretch of time, and where it lies in the picture."""

    start: float
    end: float
    x: float
    width: float

    def place(self, moment: float) -> float:
        """Per cent; what lies beyond is at the edge."""
        inside = min(max(moment, self.start), self.end)
        return self.x + self.width * (inside - self.start) / (self.end - self.start)


def draw(timeline: Timeline, *, drawn: int = DRAWN) -> Drawing:
    """The picture of a timeline."""
    windows = _windows(timeline, drawn)
    left_out = windows[-1].start - windows[0].end
    kinds = {piece.kind for piece in timeline.pieces}
    return Drawing(
        strategy=timeline.strategy,
        note=_note(timeline),
        rows=tuple(_row(timeline, rank, windows) for rank in range(timeline.ranks)),
        ticks=tuple(tick for window in windows for tick in _ticks(window)),
        colours={kind: _colour(kind) for kind in KINDS if kind in kinds},
        gap=Tick(x=windows[0].width, label=f"{show_seconds(left_out)} of the same") if len(windows) > 1 else None,
    )


def _windows(timeline: Timeline, drawn: int) -> list[_Window]:
    """The whole step, or its beginning and its end."""
    share = drawn / max(1, len(timeline.pieces)) / 2
    if 2 * share >= 1 - WORTH:
        return [_Window(start=0.0, end=timeline.total or 1.0, x=0.0, width=100.0)]
    total, width = timeline.total, (100.0 - GAP) / 2
    return [
        _Window(start=0.0, end=total * share, x=0.0, width=width),
        _Window(start=total * (1 - share), end=total, x=100.0 - width, width=width),
    ]


def _note(timeline: Timeline) -> str:
    said = "Played through with forecast times of the stages" if timeline.origin == "forecast" else "As it was measured"
    return (
        f"{said}: {timeline.micro_batches} micro-batches on {timeline.ranks} ranks under {timeline.schedule}, "
        f"{show_seconds(timeline.total)} a step, of which ranks are idle {timeline.idle:.1%}."
    )


def _row(timeline: Timeline, rank: int, windows: list[_Window]) -> Row:
    pieces = timeline.of(rank)
    boxes = (box for window in windows for piece in pieces for box in _boxes(piece, window))
    return Row(rank=rank, boxes=tuple(boxes), figures=tuple(_figures(pieces, timeline.total)))


def _boxes(piece: Piece, window: _Window) -> Iterator[Box]:
    """The part of a piece that a window shows."""
    x, end = window.place(piece.start), window.place(piece.end)
    if end <= x:
        return
    has_label = piece.micro_batch is not None and piece.kind != SEND and end - x >= LEGIBLE
    yield Box(
        colour=_colour(piece.kind),
        x=x,
        width=end - x,
        label=str(piece.micro_batch) if has_label else "",
        words=describe_piece(piece),
        is_odd=bool(piece.micro_batch is not None and piece.micro_batch % 2),
        on_link=piece.kind == SEND,
    )


def describe_piece(piece: Piece) -> str:
    """A piece in one sentence with its exact figures."""
    subject = f"{piece.kind[:1].upper()}{piece.kind[1:]}"
    about = f" of micro-batch {piece.micro_batch}, stage {piece.stage}" if piece.micro_batch is not None else ""
    target = f", to rank {piece.to}" if piece.to is not None else ""
    parts = ", ".join(f"{cause} {1e3 * seconds:,.3f}" for cause, seconds in piece.parts.items())
    when = f"from {1e3 * piece.start:,.3f} to {1e3 * piece.end:,.3f} ms"
    return f"{subject}{about}{target}: {1e3 * piece.seconds:,.3f} ms, {when}{f' ({parts} ms)' if parts else ''}"


def _figures(pieces: tuple[Piece, ...], total: float) -> Iterator[Figure]:
    for kind in KINDS:
        found = [piece.seconds for piece in pieces if piece.kind == kind]
        if found:
            yield Figure(kind=kind, count=len(found), seconds=sum(found), share=sum(found) / total)


def _ticks(window: _Window) -> Iterator[Tick]:
    """Round moments, a few in each window, none so near its end that labels would meet."""
    length = window.end - window.start
    rough = length / TICKS
    size = 10 ** floor(log10(rough))
    step = next(size * times for times in (1, 2, 5, 10) if size * times >= rough)
    count = -(-window.start // step)
    while (moment := count * step) <= window.end - 0.08 * length:
        yield Tick(x=window.place(moment), label=show_seconds(moment))
        count += 1


def _colour(kind: str) -> str:
    return f"work-{KINDS.index(kind)}"
