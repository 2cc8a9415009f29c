"""Charts of a page, drawn by plotly in whatever browser opens it: the figure as data, and the scripts that draw it.

A figure is written in plotly's own words. Its colours are names of the page's style, `var(--blue)`, which `charts.js`
looks up when it draws. plotly itself is needed only for its script, where a page is made.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.errors import BadInput
from meshwright.report.colours import variable
from meshwright.report.terms import lines_of

Values = dict[str, Any]

SCRIPT = Path(__file__).parent / "charts.js"
INSTALL = "pip install 'meshwright[pages]'"
MONOSPACE = "ui-monospace, DejaVu Sans Mono, monospace"
FIXED: Values = {"displayModeBar": False}
ZOOMABLE: Values = {
    "displaylogo": False,
    "modeBarButtons": [["zoomIn2d", "zoomOut2d", "zoom2d", "pan2d", "resetScale2d", "toImage"]],
}
CLEAR = "rgba(0,0,0,0)"
FOLDED = 34
"""Characters of a line of a tooltip, which narrow windows have room for."""
_IN_SCRIPT = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of a legend; a click hides what it stands for."""

    label: str
    colour: str
    traces: tuple[int, ...]
    """Of the figure."""
    line: str = ""
    """How a curve is dashed; empty for what is no curve."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure with all that a page shows around it."""

    words: str
    """What it shows, for those who do not see it."""
    data: Sequence[Values]
    layout: Values
    legends: tuple[tuple[str, tuple[Key, ...]], ...]
    """Each under a word of its own, which may be empty."""
    config: Values = field(default_factory=lambda: FIXED)

    @property
    def height(self) -> int:
        """Pixels, unless names need more lines."""
        return int(self.layout["height"])

    @property
    def is_zoomable(self) -> bool:
        return not self.layout["xaxis"].get("fixedrange")

    @property
    def json(self) -> Markup:
        """The figure as it may stand in a script element, whatever it holds."""
        text = json.dumps({"data": self.data, "layout": self.layout, "config": self.config}, allow_nan=False)
        return Markup(text.translate(_IN_SCRIPT))


def check_plotly(asked: str) -> None:
    """Before anything is planned or run, not after."""
    if find_spec("plotly") is None:
        raise BadInput(f"{asked} needs the package plotly, which is not installed: {INSTALL}.")


def scripts() -> tuple[Markup, ...]:
    """What a page that stands alone carries: plotly, and what draws with it."""
    return Markup(plotly_script()), Markup(charts_script())


@cache
def plotly_script() -> str:
    """plotly's own; nothing in it can end the element that it stands in."""
    check_plotly("A page with charts")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


@cache
def charts_script() -> str:
    return SCRIPT.read_text(encoding="utf-8")


def policy(inline: Iterable[str], *, script: str = "", more: Iterable[str] = ()) -> str:
    """A Content-Security-Policy: these scripts may run, and nothing is fetched but what `script` and `more` allow."""
    runs = " ".join([*(f"'sha256-{_digest(one)}'" for one in inline), *filter(None, [script])])
    parts = ["default-src 'none'", *([f"script-src {runs}"] if runs else []), "style-src 'unsafe-inline'", *more]
    return "; ".join([*parts, "img-src data: blob:", "base-uri 'none'", "form-action 'none'"])


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def plain(text: str) -> str:
    """A text of somebody else's for a figure, in which plotly would find markup, and values to put in."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def folded(strategy: str, width: int = FOLDED) -> str:
    """A strategy for a tooltip, in lines that break between its terms."""
    return "<br>".join(plain(line) for line in lines_of(strategy, width))


def shared_layout(height: int, **others: Any) -> Values:
    """What all figures have in common."""
    return {
        "height": height,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": variable("quiet")},
        "paper_bgcolor": variable("page"),
        "plot_bgcolor": CLEAR,
        "modebar": {"bgcolor": CLEAR, "color": variable("quiet"), "activecolor": variable("accent")},
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": variable("card"),
            "bordercolor": variable("quiet"),
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": variable("text")},
            "align": "left",
        },
        "showlegend": False,
        "uirevision": "kept",
        **others,
    }


def axis(unit: str = "", **others: Any) -> Values:
    """An axis with grid lines."""
    return {
        "ticksuffix": f" {unit}" if unit else "",
        "separatethousands": True,
        "exponentformat": "none",
        "tickangle": 0,
        "gridcolor": variable("line"),
        "zeroline": False,
        **others,
    }
