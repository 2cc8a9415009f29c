"""Edits of a script by short anchors, so that nothing of the script itself is kept here, and their count in lines."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

Lines = list[str]
Edit = Callable[[Lines], Lines]


class AnchorError(Exception):
    """An anchor was not found where an edit expects it: the fetched script is another version."""


def after(anchor: str, *new: str) -> Edit:
    """Insert lines after the one that contains the anchor, with its indentation."""

    def edit(lines: Lines) -> Lines:
        at = _find(lines, anchor)
        return [*lines[: at + 1], *_indented(new, lines[at]), *lines[at + 1 :]]

    return edit


def before(anchor: str, *new: str) -> Edit:
    def edit(lines: Lines) -> Lines:
        at = _find(lines, anchor)
        return [*lines[:at], *_indented(new, lines[at]), *lines[at:]]

    return edit


def replace(anchor: str, *new: str, until: str = "") -> Edit:
    """Replace the line with the anchor, or all lines up to the next one with `until`, by others or by nothing."""

    def edit(lines: Lines) -> Lines:
        at = _find(lines, anchor)
        end = _find(lines, until, at) if until else at
        return [*lines[:at], *_indented(new, lines[at]), *lines[end + 1 :]]

    return edit


def swap(old: str, new: str, *, every: bool = False) -> Edit:
    """Replace a part of the line that contains it, or of all such lines."""

    def edit(lines: Lines) -> Lines:
        if every:
            _find(lines, old, any_of_many=True)
            return [line.replace(old, new) for line in lines]
        at = _find(lines, old)
        return [*lines[:at], lines[at].replace(old, new), *lines[at + 1 :]]

    return edit


def without(anchor: str) -> Edit:
    """Drop all lines that contain the anchor."""

    def edit(lines: Lines) -> Lines:
        _find(lines, anchor, any_of_many=True)
        return [line for line in lines if anchor not in line]

    return edit


def apply(text: str, edits: Sequence[Edit]) -> str:
    lines = text.splitlines()
    for edit in edits:
        lines = edit(lines)
    return "\n".join(lines) + "\n"


def changed_lines(before: str, after: str) -> int:
    """How many lines of code a diff of two texts adds and removes; comments and empty lines do not count."""
    found = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    changed = [line for line in found if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return sum(bool(line[1:].strip()) and not line[1:].strip().startswith("#") for line in changed)


def _find(lines: Lines, anchor: str, start: int = 0, *, any_of_many: bool = False) -> int:
    found = [number for number, line in enumerate(lines) if number >= start and anchor in line]
    if not found or (len(found) > 1 and not start and not any_of_many):
        raise AnchorError(f"{anchor!r} is in {len(found)} lines")
    return found[0]


def _indented(new: Sequence[str], like: str) -> Lines:
    indent = like[: len(like) - len(like.lstrip())]
    return [indent + line for line in new]
