"""The user's own config among the plans, for `plan --against`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def place_of(document: dict[str, Any]) -> int | None:
    """The config's rank among the plans, from 1; None if there is no config or it cannot run."""
    against = document.get("against")
    return against["rank"] if against else None


def in_order(document: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every plan with its rank, including the user's: between two others, instead of its equal, or after the last."""
    plans, place = document["plans"], place_of(document)
    if place is None:
        yield from enumerate(plans, 1)
        return
    theirs = document["against"]["plan"]
    others = [plan for plan in plans if plan["strategy"] != theirs["strategy"]]
    before = min(place - 1, len(others))
    yield from enumerate(others[:before], 1)
    yield place, theirs
    yield from enumerate(others[before:], before + 2)


def verdict(against: dict[str, Any]) -> str:
    """The config's rank or the reason it has none, and what the first plan gains over it."""
    if against["rank"] is None:
        reason = against["reason"].rstrip(".")
        return f"{against['strategy']}: {reason}. {against['gain']}"
    return f"{against['strategy']} is number {against['rank']}. {against['gain']}"
