"""Colours by meaning: the same cause has the same colour in every chart of every page."""

from __future__ import annotations

from meshwright.facts.forecast import MEMORY_CAUSES
from meshwright.facts.timeline import KINDS

UNKNOWN = "text"
"""For a cause without an assigned colour."""
MEMORY = dict(
    zip(MEMORY_CAUSES, ("blue", "orange", "green", "pink", "sky", "red", "yellow", "violet", "grey"), strict=True)
)
TIME = {
    "compute": "blue",
    "tensor": "pink",
    "context": "yellow",
    "host": "grey",
    "data": "red",
    "bubble": "orange",
    "stages": "sky",
    "update": "green",
    "host copies": "violet",
    # Only in measurements, with the colours of the nearest forecast causes.
    "exposed communication": "red",
    "other": "grey",
}
WORK = dict(zip(KINDS, ("blue", "orange", "red", "green", "sky", "pink", "violet", "track"), strict=True))
CURVES = ("blue", "orange", "green", "pink", "sky", "red", "violet", "yellow")
DARK = ("blue", "violet")
"""Colours that need light text."""


def variable(colour: str) -> str:
    """A colour as a CSS variable, which `charts.js` resolves for the dark or light theme."""
    return f"var(--{colour})"
