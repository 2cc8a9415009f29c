"""Charts of a page, as its text carries them and as a browser has drawn them."""

from __future__ import annotations

import json
import re
from typing import Any

Figure = dict[str, Any]

READ = """chart => chart.querySelector('.plot')._fullData.map(
    ({name, type, x, y, base, visible, text, hovertext, marker}) =>
    ({name, type, x, y, base, visible, text, hovertext, colour: marker.color}))"""
DRAWN = """() => [...document.querySelectorAll('.chart')].every(chart =>
    !chart.checkVisibility() || chart.dataset.drawn === String(chart.clientWidth))"""


def figures(text: str) -> list[Figure]:
    """All figures that a page carries."""
    return [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', text)]


def wait_until_drawn(page: Any) -> None:
    """Every chart that can be seen, as wide as it has to be."""
    page.wait_for_function(DRAWN)


def traces(chart: Any) -> list[dict[str, Any]]:
    """What plotly has drawn in an element `.chart`."""
    found: list[dict[str, Any]] = chart.evaluate(READ)
    return found


def tooltip(page: Any, *, of: str) -> str:
    """The text of plotly's tooltip, once it tells of something."""
    page.wait_for_function(
        "text => document.querySelector('.hoverlayer .hovertext')?.textContent.includes(text)", arg=of
    )
    return str(page.locator(".hoverlayer .hovertext").text_content())


def point_at(page: Any, box: Any) -> None:
    """Move the mouse to the middle of a box of a chart."""
    box.scroll_into_view_if_needed()
    place = box.bounding_box()
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2, steps=3)
