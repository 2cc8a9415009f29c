"""Links of Markdown pages: moved to where the site has their targets, and checked.

Pages are written for a reader of the repository, where `docs/jobs.md` links to `../examples/gpt.py`. The site has only
pages, so files outside docs become pages that show them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

FENCE = re.compile(r"^ *(```|~~~)")
LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))|((?:href|src)=\")([^\"]+)(\")")
OUTSIDE = re.compile(r"^[a-z][a-z0-9+.-]*:")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$")


def prose_lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Each line with its number, and whether it is prose, not code."""
    in_code = False
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if FENCE.match(line):
            in_code = not in_code
            yield number, line, False
        else:
            yield number, line, not in_code


def _shown(line: str) -> str:
    """A line with code spans blanked, so that links inside them do not count."""
    return re.sub(r"`[^`]*`", lambda code: "\0" * len(code[0]), line)


def links_of(text: str) -> Iterator[tuple[int, str]]:
    """Each link's line and target, except those to other hosts."""
    for number, line, is_prose in prose_lines(text):
        if is_prose:
            for found in LINK.finditer(_shown(line)):
                target = found[2] or found[5]
                if not OUTSIDE.match(target):
                    yield number, target


def rewrite(text: str, place: str, moved: Callable[[str], str]) -> str:
    """The page at `place` in the site, with the links of a page of the repository.

    `moved` gives the place in the site of a path that is relative to the repository's root.
    """
    lines = ((_indented(line) if is_prose else line, is_prose) for _, line, is_prose in prose_lines(text))
    return "".join(_rewritten(line, place, moved) if is_prose else line for line, is_prose in lines)


def _indented(line: str) -> str:
    """Lists inside lists are indented by four spaces in the site's Markdown, and by two or three on GitHub."""
    return re.sub(r"^ {2,3}(?=(?:-|\d+\.) )", "    ", line)


def _rewritten(line: str, place: str, moved: Callable[[str], str]) -> str:
    def new(found: re.Match[str]) -> str:
        left, target, right = (found[1], found[2], found[3]) if found[1] else (found[4], found[5], found[6])
        if OUTSIDE.match(target) or target.startswith("#") or "\0" in _shown(line)[found.start() : found.end()]:
            return found[0]
        path, mark, anchor = target.partition("#")
        return f"{left}{relpath(moved(path), dirname(place) or '.')}{mark}{anchor}{right}"

    return LINK.sub(new, line)


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for _, line, is_prose in prose_lines(text):
        if is_prose and (heading := HEADING.match(line.rstrip("\n"))):
            slug = base = slug_of(heading[1])
            count = 0
            while slug in found:
                count += 1
                slug = f"{base}-{count}"
            found.add(slug)
    return found


def slug_of(heading: str) -> str:
    plain = re.sub(r"\]\([^)]*\)", "", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def dead_links(root: Path, pages: list[str]) -> list[str]:
    """A line for each link whose file or heading does not exist; paths are relative to `root`."""
    texts = {page: (root / page).read_text(encoding="utf-8") for page in pages}
    anchors = {page: anchors_of(text) for page, text in texts.items()}
    return [
        f"{page}:{number}: {target}: {reason}"
        for page, text in texts.items()
        for number, target in links_of(text)
        if (reason := _reason(root, page, target, anchors))
    ]


def _reason(root: Path, page: str, target: str, anchors: dict[str, set[str]]) -> str:
    path, _, anchor = target.partition("#")
    other = normpath(join(dirname(page), path)) if path else page
    if other.startswith("../") or not (root / other).exists():
        return "no such file"
    return f"no heading #{anchor}" if anchor and other in anchors and anchor not in anchors[other] else ""
