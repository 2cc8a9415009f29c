"""Plot forecast against measured step times of planner_on_links.py, a panel for each cell.

pip install matplotlib
python benchmarks/link_plot.py docs/data/planner_on_links.json docs/images/planner-on-links.svg
"""

from __future__ import annotations

import argparse
import json
from math import inf
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from planner_on_links import NEAR, rate_words

# Blue, orange and green of the Okabe-Ito palette, which colour-blind readers can tell apart.
OTHERS, CHOSEN, BEST = "#0072b2", "#e69f00", "#009e73"


def draw(cells: list[dict[str, Any]]) -> Figure:
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    rates = sorted({cell["gigabits"] for cell in cells}, key=lambda rate: -rate or -inf)  # unlimited first
    figure = Figure(figsize=(3.4 * len(rates), 3.3 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(rates), squeeze=False)
    for axes in panels.flat:
        axes.set_visible(False)  # until its cell is there
    for cell in cells:
        panel(panels[models.index(cell["model"])][rates.index(cell["gigabits"])], cell)
    figure.supxlabel("measured step, ms")
    figure.supylabel("forecast step, ms")
    return figure


def panel(axes: Axes, cell: dict[str, Any]) -> None:
    rows = [row for row in cell["rows"] if row["seconds"] is not None]
    for row in rows:
        colour = {cell["best"]: BEST}.get(row["strategy"], OTHERS)
        axes.plot(1e3 * row["seconds"], 1e3 * row["forecast"], "o", color=colour, markersize=4.5, alpha=0.85)
    chosen = next(row for row in rows if row["strategy"] == cell["chosen"])
    ring = {"color": CHOSEN, "markersize": 10, "markerfacecolor": "none", "markeredgewidth": 1.8}
    axes.plot(1e3 * chosen["seconds"], 1e3 * chosen["forecast"], "o", **ring)
    best = 1e3 * min(row["seconds"] for row in rows)
    axes.axvspan(best, NEAR * best, color=BEST, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", visible=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    title = f"{cell['model']}, {rate_words(cell['gigabits'])}"
    axes.set_title(f"{title}\nSpearman {cell['spearman']:.2f}, chosen +{cell['slower'] - 1:.0%}", fontsize=9)
    axes.tick_params(labelsize=8, which="both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, help="an SVG or PNG file")
    options = parser.parse_args()
    matplotlib.rcParams |= {"svg.hashsalt": "meshwright", "font.size": 9}  # the same file each time
    draw(list(json.loads(options.data.read_text())["cells"].values())).savefig(
        options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None, dpi=130
    )


if __name__ == "__main__":
    main()
