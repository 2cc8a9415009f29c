"""Charts that plotly draws in the browser: a figure as data, and the scripts that draw it.

A figure uses plotly's own schema. Its colours are CSS variables of the page, `var(--blue)`, which `charts.js` resolves
when it draws. The plotly package is needed only for its script, when a page is written.
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
"""Characters per line of a tooltip; fits narrow windows."""
_IN_SCRIPT = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of a legend; a click hides its traces."""

    label: str
    colour: str
    traces: tuple[int, ...]
    """Indices of the figure's traces."""
    line: str = ""
    """Dash pattern of a curve; empty for anything else."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure with everything that a page shows around it."""

    words: str
    """Description for screen readers."""
    data: Sequence[Values]
    layout: Values
    legends: tuple[tuple[str, tuple[Key, ...]], ...]
    """Each with a title, which may be empty."""
    config: Values = field(default_factory=lambda: FIXED)

    @property
    def height(self) -> int:
        """Height in pixels, unless names need more lines."""
        return int(self.layout["height"])

    @property
    def is_zoomable(self) -> bool:
        return not self.layout["xaxis"].get("fixedrange")

    @property
    def json(self) -> Markup:
        """The figure as JSON that is safe inside a script element."""
        text = json.dumps({"data": self.data, "layout": self.layout, "config": self.config}, allow_nan=False)
        return Markup(text.translate(_IN_SCRIPT))


def check_plotly(option: str) -> None:
    """Raise if plotly is missing, before anything is planned or run."""
    if find_spec("plotly") is None:
        raise BadInput(f"{option} needs the package plotly, which is not installed: {INSTALL}.")


def scripts() -> tuple[Markup, ...]:
    """The scripts of a self-contained page: plotly, and the code that draws with it."""
    return Markup(plotly_script()), Markup(charts_script())


@cache
def plotly_script() -> str:
    """plotly's own script, escaped so that it cannot end its script element."""
    check_plotly("A page with charts")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


@cache
def charts_script() -> str:
    return SCRIPT.read_text(encoding="utf-8")


def policy(inline: Iterable[str], *, script: str = "", more: Iterable[str] = ()) -> str:
    """A Content-Security-Policy: only these scripts run, and only what `script` and `more` allow is fetched."""
    runs = " ".join([*(f"'sha256-{_digest(one)}'" for one in inline), *filter(None, [script])])
    parts = ["default-src 'none'", *([f"script-src {runs}"] if runs else []), "style-src 'unsafe-inline'", *more]
    return "; ".join([*parts, "img-src data: blob:", "base-uri 'none'", "form-action 'none'"])


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def plain(text: str) -> str:
    """Escape foreign text for a figure, where plotly would interpret markup and placeholders."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def folded(strategy: str, width: int = FOLDED) -> str:
    """A strategy for a tooltip, with lines broken between its terms."""
    return "<br>".join(plain(line) for line in lines_of(strategy, width))


def shared_layout(height: int, **others: Any) -> Values:
    """Layout settings that all figures share."""
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
