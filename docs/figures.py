"""Draw the figures of the documentation from the code that they are about.

pip install matplotlib
python docs/figures.py                    # writes docs/strategies/states.svg
python docs/figures.py --also states.png  # and a copy to look at
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshwright.facts.model import ModelFacts, ParameterFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import Place, data_strategy
from meshwright.units import gib, show_count

FOLDER = Path(__file__).parent / "strategies"
RANKS = 8
PLACE = Place(device="cuda", devices=RANKS, ranks=RANKS, local_ranks=RANKS)
STRATEGIES = ("single", "dp", "ddp", "fsdp:no-shard", "zero1", "zero2", "hsdp=2x4", "fsdp:grad-op", "fsdp")
PRECISIONS = {"fp32": "fp32", "bf16": "bf16 with fp32 masters"}
# Blue, orange and green of the Okabe-Ito palette, which colour-blind readers can tell apart.
COLOURS = {"parameters": "#0072b2", "gradients": "#e69f00", "optimizer": "#009e73"}


def transformer(*, layers: int, width: int, vocabulary: int) -> ModelFacts:
    """A decoder with a tied embedding, biases and norms left out: they are a thousandth of it."""
    shapes = {"mix": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    named = {f"blocks.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
    return ModelFacts(
        parameters=tuple(
            ParameterFacts(names=(name,), shape=shape, itemsize=4)
            for name, shape in {"token": (vocabulary, width), **named}.items()
        ),
        blocks=tuple(f"blocks.{layer}" for layer in range(layers)),
        optimizer_slots=2.0,
    )


def states(facts: ModelFacts, text: str) -> dict[str, int] | None:
    """Bytes by cause on the fullest rank; None where the strategy refuses."""
    parsed = Strategy.parse(text)
    strategy = parsed.resolve(1 if parsed.traits.alone else RANKS)
    technique = data_strategy(strategy)
    if technique.refuse(strategy, facts, PLACE):
        return None
    layout, elements = technique.layout(strategy), sum(parameter.count for parameter in facts.parameters)
    update, masters = elements * (layout.update_bytes or 4), 4 * elements if layout.masters else 0
    return {
        "parameters": elements * (layout.parameter_bytes or 4) // layout.parameters,
        "gradients": update // layout.gradients,
        "optimizer": round(update * facts.optimizer_slots + masters) // layout.optimizer,
    }


def draw_states(facts: ModelFacts) -> Figure:
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    panels = figure.subplots(1, len(PRECISIONS), sharex=True, sharey=True)
    for panel, (precision, title) in zip(panels, PRECISIONS.items(), strict=True):
        for place, text in enumerate(STRATEGIES):
            draw_bar(panel, place, states(facts, f"{text},{precision}"))
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("GiB on each rank")
        panel.set_yticks(range(len(STRATEGIES)), STRATEGIES, family="monospace")
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.set_xlim(0, 17.5)
    panels[0].invert_yaxis()
    count = show_count(sum(parameter.count for parameter in facts.parameters))
    figure.suptitle(f"{count} parameters, Adam, {RANKS} ranks (single: 1)", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[: len(COLOURS)], labels[: len(COLOURS)], loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_bar(panel: Axes, place: int, memory: dict[str, int] | None) -> None:
    if memory is None:
        panel.text(0.2, place, "refused", va="center", color="#666666", fontsize=9)
        return
    left = 0.0
    for cause, size in memory.items():
        panel.barh(place, gib(size), left=left, height=0.7, color=COLOURS[cause], label=cause)
        left += gib(size)
    panel.text(left + 0.2, place, f"{left:.1f}", va="center", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--also", type=Path, help="a second file of any kind that matplotlib writes, such as a PNG")
    also = parser.parse_args().also
    # Text stays text and ids do not change from run to run, so the file is small and its diffs are readable.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "meshwright", "font.size": 9})
    figure = draw_states(transformer(layers=18, width=2048, vocabulary=50304))
    figure.savefig(FOLDER / "states.svg", metadata={"Date": None, "Creator": None})
    if also is not None:
        figure.savefig(also, dpi=130)


if __name__ == "__main__":
    main()
