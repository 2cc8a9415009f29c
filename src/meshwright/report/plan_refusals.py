"""Refused candidates, grouped by reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 100
"""Candidates of one kind that a page lists; more would add nothing."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NEED = re.compile(r"needs (\d+(?:\.\d+)?)")


@dataclass(frozen=True, kw_only=True)
class RefusalKind:
    """Candidates refused for the same reason."""

    title: str
    count: int
    shown: tuple[tuple[str, str], ...]
    """Strategies with their individual reasons."""

    @property
    def hidden(self) -> int:
        return self.count - len(self.shown)


def kinds_of_refusals(refused: Sequence[dict[str, str]]) -> list[RefusalKind]:
    """The most common kind first; within "too large", the smallest excess first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for refusal in refused:
        groups.setdefault(_pattern(refusal["reason"]), []).append((refusal["strategy"], refusal["reason"]))
    kinds = [_kind(pattern, found) for pattern, found in groups.items()]
    return sorted(kinds, key=lambda kind: -kind.count)


def _pattern(reason: str) -> str:
    """Reasons that differ only in numbers share a pattern; so do all that lack memory."""
    return "Too large" if _NEED.match(reason) else _NUMBER.sub("…", reason)


def _kind(pattern: str, found: list[tuple[str, str]]) -> RefusalKind:
    reasons = {reason for _, reason in found}
    title = pattern if len(reasons) > 1 else reasons.pop()
    nearest = sorted(found, key=lambda entry: float(need[1]) if (need := _NEED.match(entry[1])) else 0.0)
    return RefusalKind(title=title[:1].upper() + title[1:], count=len(found), shown=tuple(nearest[:SHOWN]))
