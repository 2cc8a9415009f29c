"""Stacked bars by cause as a figure: each strategy's name above its bar, the total at the right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from meshwright.report.bars import BarPart, Chart, Lane
from meshwright.report.charts import MONOSPACE, Key, Plot, Values, axis, folded, plain, shared_layout
from meshwright.report.colours import variable

NAME, GAP, BELOW = 19, 12, 30
"""Pixels of a name's line, of the gap between strategies, and of the axis."""
THICKNESS = (20, 8)
"""Pixels of a strategy's first bar, and of the one below it."""


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Positions of the bars, in pixels from the top."""

    kinds: tuple[str, ...]

    @property
    def pitch(self) -> int:
        return NAME + GAP + sum(THICKNESS[: len(self.kinds)]) + 2 * (len(self.kinds) - 1)

    def top(self, lane: int) -> float:
        """Top of the lane's first bar, below its name."""
        return lane * self.pitch + NAME

    def middle(self, lane: int, kind: str) -> float:
        place = self.kinds.index(kind)
        return self.top(lane) + sum(THICKNESS[:place]) + 2 * place + THICKNESS[place] / 2


def bar_plot(chart: Chart) -> Plot:
    rows = _Rows(kinds=tuple(chart.colours))
    data, legends = list(_traces(chart, rows)), tuple(_legends(chart))
    return Plot(words=chart.words, data=data, layout=_layout(chart, rows), legends=legends)


def _traces(chart: Chart, rows: _Rows) -> Iterator[Values]:
    """One trace per kind and cause, in the order of `Chart.columns`."""
    for kind, cause in chart.columns:
        found = [
            (number, lane, part)
            for number, lane in enumerate(chart.lanes)
            if kind in lane.bars
            for part in lane.bars[kind].parts
            if part.cause == cause
        ]
        yield {
            "type": "bar",
            "orientation": "h",
            "name": plain(f"{kind}: {cause}" if kind else cause),
            "x": [part.size for _, _, part in found],
            "y": [rows.middle(number, kind) for number, _, _ in found],
            "width": THICKNESS[rows.kinds.index(kind)],
            "marker": {"color": variable(chart.colours[kind][cause]), "line": {"color": variable("page"), "width": 1}},
            "opacity": 0.75 if rows.kinds.index(kind) else 1.0,
            "hoverinfo": "text",
            "hovertext": [_tip(lane, kind, part) for _, lane, part in found],
        }


def _tip(lane: Lane, kind: str, part: BarPart) -> str:
    whole = f"{kind} {lane.bars[kind].total}" if kind else lane.bars[kind].total
    return f"{folded(lane.strategy)}<br><b>{plain(part.cause)} {part.amount}</b><br>{part.share} of {whole}"


def _layout(chart: Chart, rows: _Rows) -> Values:
    height = len(chart.lanes) * rows.pitch
    return shared_layout(
        height + BELOW,
        barmode="stack",
        dragmode=False,
        margin={"l": 1, "r": 12, "t": 0, "b": BELOW, "pad": 0},
        xaxis=axis(chart.unit, fixedrange=True, range=[0, _scale(chart)]),
        yaxis={"visible": False, "fixedrange": True, "range": [height, 0]},
        annotations=list(_names(chart, rows)),
        shapes=[] if chart.limit is None else [_limit(chart.limit, rows, lane) for lane in range(len(chart.lanes))],
        meta={"lanes": len(chart.lanes), "total": max((len(lane.total) for lane in chart.lanes), default=0)},
    )


def _scale(chart: Chart) -> float:
    """The end of the axis: the longest bar, or slightly beyond the limit."""
    sums = [sum(part.size for part in bar.parts) for lane in chart.lanes for bar in lane.bars.values()]
    return max([*sums, 1.01 * (chart.limit or 0.0)], default=0.0) or 1.0


def _names(chart: Chart, rows: _Rows) -> Iterator[Values]:
    """Strategies at the left, which `charts.js` wraps if they are too long, and totals at the right."""
    shared = {"xref": "paper", "yref": "y", "yanchor": "bottom", "showarrow": False, "borderpad": 0}
    shared["bgcolor"] = variable("page")  # keeps grid lines behind the numbers
    for number, lane in enumerate(chart.lanes):
        font = {"color": variable("text"), "weight": 400 if number else 700}
        place = {**shared, "y": rows.top(number) - 1}
        yield {
            **place,
            **{"name": "strategy", "text": plain(lane.strategy), "x": 0, "xanchor": "left", "align": "left"},
            "font": {**font, "family": MONOSPACE},
        }
        yield {**place, "name": "total", "text": plain(lane.total), "x": 1, "xanchor": "right", "font": font}


def _limit(at: float, rows: _Rows, lane: int) -> Values:
    """A dashed line across one lane's bars, clear of names and totals."""
    line = {"color": variable("limit"), "width": 2, "dash": "4px,3px"}
    above, below = rows.top(lane), rows.top(lane + 1) - NAME - GAP + 4
    return {"type": "line", "xref": "x", "yref": "y", "x0": at, "x1": at, "y0": above, "y1": below, "line": line}


def _legends(chart: Chart) -> Iterator[tuple[str, tuple[Key, ...]]]:
    numbers = count()
    for kind, causes in chart.colours.items():
        if keys := tuple(Key(label=cause, colour=causes[cause], traces=(next(numbers),)) for cause in causes):
            yield kind, keys
