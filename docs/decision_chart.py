"""Draw the decision guide's chart: the kind of the planner's first choice by model size and number of devices.

python docs/decision_chart.py                                     # writes docs/decision-guide.svg, in some minutes
python docs/decision_chart.py --models gpt2 llama3-8b --print     # some of it, on the terminal
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

from decision_guide import MODELS

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.plan import Plan
from meshwright.jobs.load import load_job
from meshwright.planner.search import best_of_each_kind, choose
from meshwright.units import show_count

FILE = Path(__file__).parent / "decision-guide.svg"
DEVICE = "H100-80GB"
DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Up to eight in one node, then nodes of eight."""
TOKENS = 2**22
"""Tokens of one step, for every model and number of devices."""
COLOURS = {
    "single": "#d9d9d9",
    "ddp": "#cfe3f5",
    "zero1": "#9cc4e4",
    "zero2": "#5b9bd1",
    "fsdp": "#2d6fa8",
    "hsdp": "#174a78",
    "tp": "#e8a33d",
    "pp": "#7fb77e",
    "tp + pp": "#c97b63",
}
"""By the model axes, or by the data axis alone."""
DARK = ("zero2", "fsdp", "hsdp")
WIDTH, HEIGHT, LEFT, TOP = 104, 46, 150, 64


@dataclass(frozen=True)
class Cell:
    model: str
    parameters: int
    devices: int
    plan: Plan | None

    @property
    def kind(self) -> str:
        """What colours the cell."""
        if self.plan is None:
            return ""
        words = [term.word for term in self.plan.strategy.axes]
        return " + ".join(words) if words else str(self.plan.strategy.data)

    @property
    def label(self) -> tuple[str, str]:
        """The axes, and the policies."""
        if self.plan is None:
            return "nothing fits", ""
        strategy = self.plan.strategy
        words = ([strategy.data] if strategy.data_ranks > 1 else []) + [f"{a.word}={a.size}" for a in strategy.axes]
        policies = [f"ac={strategy.recompute}"] if strategy.recompute != "none" else []
        policies += ["offload"] if strategy.offload else []
        return ", ".join(map(str, words)) or "single", ", ".join(policies)


def cells_of(model: str, devices: tuple[int, ...]) -> list[Cell]:
    length = MODELS[model]
    job = load_job(f"preset:{model}:seq={length}")
    facts = describe(job)
    planner = Planner(job, facts, TOKENS // length)
    parameters = sum(parameter.count for parameter in facts.parameters)
    return [Cell(model, parameters, count, first_choice(planner, count)) for count in devices]


def first_choice(planner: Planner, devices: int) -> Plan | None:
    nodes = f"{devices // 8}x8x" if devices > 8 else f"{devices}x"
    cluster = Cluster.parse(f"{nodes}{DEVICE}")
    found = planner.search(cluster, PlanOptions(fast=True))
    context = planner.context(cluster)
    plans = choose(context, best_of_each_kind(context, found.plans))
    return plans[0] if plans else None


def draw(rows: list[list[Cell]], devices: tuple[int, ...]) -> str:
    width, height = LEFT + WIDTH * len(devices) + 20, TOP + HEIGHT * len(rows) + 84
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(
            LEFT, 22, f"First choice by model and number of {DEVICE}, {TOKENS:,} tokens a step", size=16, anchor="start"
        ),
    ]
    for place, count in enumerate(devices):
        parts.append(text(LEFT + WIDTH * (place + 0.5), TOP - 12, f"{count}", size=13))
    for line, row in enumerate(rows):
        y = TOP + HEIGHT * line
        parts.append(text(LEFT - 10, y + 20, row[0].model, size=13, anchor="end"))
        parts.append(text(LEFT - 10, y + 36, show_count(row[0].parameters), size=11, anchor="end", colour="#555555"))
        for place, cell in enumerate(row):
            parts += draw_cell(cell, LEFT + WIDTH * place, y)
    edge = LEFT + WIDTH * sum(count <= 8 for count in devices)
    parts.append(f'<path d="M{edge} {TOP - 28}V{TOP + HEIGHT * len(rows)}" stroke="#222222" stroke-width="2"/>')
    parts.append(text(edge - 8, TOP - 30, "one node", size=11, anchor="end", colour="#555555"))
    parts.append(text(edge + 8, TOP - 30, "nodes of eight", size=11, anchor="start", colour="#555555"))
    return "\n".join([*parts, *legend(rows, TOP + HEIGHT * len(rows) + 34), "</svg>"]) + "\n"


def draw_cell(cell: Cell, x: float, y: float) -> list[str]:
    fill = COLOURS.get(cell.kind, "#f4f4f4")
    ink = "#ffffff" if cell.kind in DARK else "#777777" if cell.plan is None else "#111111"
    axes, policies = cell.label
    rect = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="{fill}" stroke="#ffffff"/>'
    middle = x + WIDTH / 2
    if not policies:
        return [rect, text(middle, y + HEIGHT / 2 + 4, axes, size=12, colour=ink)]
    return [rect, text(middle, y + 20, axes, size=12, colour=ink), text(middle, y + 36, policies, size=10, colour=ink)]


def legend(rows: list[list[Cell]], y: float) -> list[str]:
    kinds = [kind for kind in COLOURS if any(cell.kind == kind for row in rows for cell in row)]
    parts, x = [], float(LEFT)
    for kind in kinds:
        name = f"{kind} with or without a data axis" if kind[:2] in ("tp", "pp") else kind
        parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{COLOURS[kind]}" stroke="#999999"/>')
        parts.append(text(x + 20, y, name, size=12, anchor="start"))
        x += 34 + 7 * len(name)
    return parts


def text(x: float, y: float, words: str, *, size: int, anchor: str = "middle", colour: str = "#111111") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--print", action="store_true", help="print the choices instead of drawing them")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        rows.append(cells_of(model, DEVICES))
        print(f"{model}: {', '.join(cell.label[0] for cell in rows[-1])}", file=sys.stderr, flush=True)
    if not options.print:
        FILE.write_text(draw(rows, DEVICES))


if __name__ == "__main__":
    main()
