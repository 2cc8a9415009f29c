"""Loss curves of a comparison in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

from meshwright.report.charts import ZOOMABLE, Key, Plot, Values, axis, folded, plain, shared_layout
from meshwright.report.colours import CURVES, variable

HEIGHT = 340
DASHES = ("solid", "dash", "dot", "dashdot")
"""Overlapping curves differ in colour and dashes; the next dash pattern is used once all colours are."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    strategy: str
    colour: str
    dash: str
    losses: tuple[float | None, ...]

    @property
    def cells(self) -> list[str]:
        return ["none" if loss is None else f"{loss:.6f}" for loss in self.losses]


@dataclass(frozen=True, kw_only=True)
class Curves:
    curves: tuple[Curve, ...]
    checked: int | None
    """Number of steps whose losses were checked against one process; None if all were."""

    @property
    def steps(self) -> int:
        return max(len(curve.losses) for curve in self.curves)

    @property
    def words(self) -> str:
        """Description of the curves for screen readers."""
        ends = "; ".join(f"{curve.strategy} from {curve.cells[0]} to {curve.cells[-1]}" for curve in self.curves)
        return f"Loss curves of {len(self.curves)} strategies over {self.steps} steps: {ends}"


def loss_curves(rows: Sequence[dict[str, Any]], *, checked: int) -> Curves | None:
    """All rows' losses; None if there are too few to draw."""
    held = [(row["strategy"], tuple(row["losses"])) for row in rows if row["losses"]]
    longest = max((len(losses) for _, losses in held), default=0)
    if longest < 2 or all(loss is None for _, losses in held for loss in losses):
        return None
    styles = cycle(product(DASHES, CURVES))
    curves = [
        Curve(strategy=strategy, colour=colour, dash=dash, losses=losses)
        for (strategy, losses), (dash, colour) in zip(held, styles, strict=False)
    ]
    return Curves(curves=tuple(curves), checked=checked if checked < longest else None)


def curves_plot(curves: Curves) -> Plot:
    """The figure: steps to the right, losses up, a dashed line after the checked steps."""
    keys = tuple(
        Key(label=curve.strategy, colour=curve.colour, traces=(number,), line=curve.dash)
        for number, curve in enumerate(curves.curves)
    )
    return Plot(
        words=curves.words,
        data=[_trace(curve) for curve in curves.curves],
        layout=shared_layout(
            HEIGHT,
            dragmode="zoom",
            margin={"l": 52, "r": 12, "t": 32, "b": 44},
            xaxis=axis(title={"text": "step"}, tickformat="d", range=[0.7, curves.steps + 0.3]),
            yaxis=axis(title={"text": "loss"}),
            shapes=[] if curves.checked is None else [_until(curves.checked + 0.5)],
        ),
        legends=(("", keys),),
        config=ZOOMABLE,
    )


def _trace(curve: Curve) -> Values:
    tips = [f"{folded(curve.strategy)}<br>step {step}: <b>loss {loss}</b>" for step, loss in enumerate(curve.cells, 1)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(curve.strategy),
        "x": list(range(1, len(curve.losses) + 1)),
        "y": list(curve.losses),
        "line": {"color": variable(curve.colour), "dash": curve.dash, "width": 2},
        "marker": {"color": variable(curve.colour), "size": 5},
        "hoverinfo": "text",
        "hovertext": tips,
    }


def _until(step: float) -> Values:
    line = {"color": variable("quiet"), "width": 1, "dash": "dash"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1, "line": line}
