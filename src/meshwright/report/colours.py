"""Which of the page's colours stands for what: the same cause has the same one in every chart of every page."""

from __future__ import annotations

from meshwright.facts.forecast import MEMORY_CAUSES
from meshwright.facts.timeline import KINDS

UNKNOWN = "text"
"""For a cause that has no colour of its own."""
MEMORY = dict(
    zip(MEMORY_CAUSES, ("blue", "orange", "green", "pink", "sky", "red", "yellow", "violet", "grey"), strict=True)
)
TIME = {
    "compute": "blue",
    "tensor": "pink",
    "host": "grey",
    "data": "red",
    "bubble": "orange",
    "stages": "sky",
    "update": "green",
    "host copies": "violet",
}
WORK = dict(zip(KINDS, ("blue", "orange", "red", "green", "sky", "pink", "violet", "track"), strict=True))
CURVES = ("blue", "orange", "green", "pink", "sky", "red", "violet", "yellow")
DARK = ("blue", "violet")
"""Those that light letters stand on."""


def variable(colour: str) -> str:
    """A colour as styles and figures name it; `charts.js` looks up what it is when the page is dark, or light."""
    return f"var(--{colour})"
