"""A strategy's layout of a job, as a value that prints and shows itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.facts import html


@dataclass(frozen=True)
class Layout:
    """How a strategy splits a job. `document` is what `meshwright layout --json` prints."""

    document: Mapping[str, Any]

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each axis of the device mesh."""
        return dict(self.document["mesh"])

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items()) or "one process"
        return f"{self.document['strategy']} on {self.document['ranks']} ranks: {axes}"

    def _repr_html_(self) -> str:
        parts = [html.paragraph(str(self), strong=True)]
        for name in ("units", "tensor", "operators", "stages"):
            if self.document.get(name):
                parts.append(html.records(name, self.document[name]))
        if "schedule" in self.document:
            schedule = self.document["schedule"]
            parts.append(html.paragraph(f"{schedule['name']}: bubble {schedule['bubble']:.1%}"))
            parts.append(html.preformatted(schedule["grid"]))
        return html.block(parts)
