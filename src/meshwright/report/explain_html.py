"""A strategy explained on a job, as a page: the pictures, then every rank's walk in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.report.colours import MEMORY, UNKNOWN, WORK
from meshwright.report.explain import (
    COLUMNS,
    WalkPass,
    forecast_sentence,
    headline,
    passes_of,
    rank_name,
    walk_sentence,
)
from meshwright.report.explain_svg import DRAWN, holds_picture, timeline_picture, walk_picture
from meshwright.report.html import render_page, write_file


@dataclass(frozen=True, kw_only=True)
class WalkSection:
    """One rank's walk on the page."""

    name: str
    sentence: str
    picture: Markup
    legend: Mapping[str, str]
    """Colours by cause of memory."""
    left_out: int
    """Visits that the picture does not show."""
    passes: list[WalkPass]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One kind of parallelism on the same job: a picture, or the reason why there is none."""

    kind: str
    strategy: str
    picture: Markup | None = None
    refused: str = ""


def explain_html(document: dict[str, Any]) -> str:
    timeline = document["timeline"]
    return render_page(
        "explain_page.html",
        has_charts=False,
        headline=headline(document),
        **{name: document[name] for name in ("job", "strategy", "cluster", "global_batch")},
        summaries=document["summaries"],
        forecast=forecast_sentence(document),
        holds=holds_picture(document["holds"]),
        ranks=document["holds"]["ranks"],
        drawn=len(document["holds"]["held"]),
        alternatives=[_alternative(one) for one in document["side_by_side"]],
        timeline=timeline and timeline_picture(timeline),
        work=_work(timeline),
        walks=[_section(walk) for walk in document["walks"]],
        columns=COLUMNS,
    )


def write_explanation(document: dict[str, Any], path: Path) -> None:
    write_file(explain_html(document), path)


def _section(walk: dict[str, Any]) -> WalkSection:
    causes = {cause for visit in walk["visits"] for cause in visit["held"]}
    ordered = [*(cause for cause in MEMORY if cause in causes), *sorted(causes - set(MEMORY))]
    return WalkSection(
        name=rank_name(walk),
        sentence=walk_sentence(walk),
        picture=walk_picture(walk),
        legend={cause: MEMORY.get(cause, UNKNOWN) for cause in ordered},
        left_out=max(0, len(walk["visits"]) - DRAWN),
        passes=passes_of(walk),
    )


def _alternative(one: dict[str, Any]) -> Alternative:
    if "refused" in one:
        return Alternative(kind=one["kind"], strategy=one["strategy"], refused=one["refused"])
    return Alternative(kind=one["kind"], strategy=one["strategy"], picture=holds_picture(one))


def _work(timeline: dict[str, Any] | None) -> dict[str, str]:
    """Colours by kind of work, of those that the timeline has."""
    kinds = {piece["kind"] for piece in timeline["pieces"]} if timeline else set()
    return {kind: colour for kind, colour in WORK.items() if kind in kinds and kind not in ("idle", "send")}
