"""SVG drawings for light and dark pages: lines and text have the page's colour, and areas are translucent."""

from __future__ import annotations

from html import escape

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
"""Of the Okabe-Ito palette, which colour-blind readers can tell apart."""
# A picture in an <img> does not inherit the page's colour, but it does know whether the page is dark.
STYLE = ":root{color:#1f2328}@media (prefers-color-scheme:dark){:root{color:#e6edf3}}text{fill:currentColor}"
FONT = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"


class Drawing:
    """Shapes in the order in which they were added."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._shapes: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, colour: str | None = None, *, dashed: bool = False
    ) -> None:
        """A rectangle; without a colour, only its outline."""
        fill = f'fill="{colour}" fill-opacity="0.38"' if colour and not dashed else 'fill="none"'
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        line = colour or "currentColor"
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" {fill} stroke="{line}"{dashes}/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, anchor: str = "middle", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, *, arrow: bool = False, dashed: bool = False) -> None:
        end = ' marker-end="url(#arrow)"' if arrow else ""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._shapes.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="currentColor"{end}{dashes}/>'
        )

    def both_ways(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """An arrow with two heads."""
        middle = ((x + to_x) / 2, (y + to_y) / 2)
        self.line(*middle, x, y, arrow=True)
        self.line(*middle, to_x, to_y, arrow=True)

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'role="img" aria-label="{escape(self.label)}" font-family="{FONT}">'
        )
        marker = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
        )
        return "\n".join([head, f"<style>{STYLE}</style>", marker, *self._shapes, "</svg>\n"])
