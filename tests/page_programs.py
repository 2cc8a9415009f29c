"""The code of a documentation page: which files it shows, which commands, and what those print.

A block `python title="job.py"` is a file, and so is `diff title="after.py"` (its new side). A block `sh` is run, line
by line, in the folder with these files; a block `text` right after it is what it prints. Blocks of any other kind are
not run: `console` is for commands that need what a test does not have, such as GPUs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from page_blocks import side

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"\n+```text\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
GAP = "..."
"""A line of this stands for any number of lines that are left out."""
MEASURED = re.compile(r"[\d.,]+(?: (?:ms|s|MiB|GiB/s|samples/s|tokens/s)\b|e[+-]\d+)")
"""Times, memory, and differences that rounding makes."""
FRAMES = re.compile(r"[\s\u2500-\u257f]+")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
NEAR = 2e-3
"""Relative: decimals are rounded where they are printed, and CPUs round differently."""


@dataclass(frozen=True)
class Block:
    kind: str
    title: str | None
    text: str
    output: str | None
    """What the page says that it prints; None where it does not say."""
    output_span: tuple[int, int] | None
    """Where that is in the page."""

    @property
    def commands(self) -> list[str]:
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


@dataclass(frozen=True)
class Page:
    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(DOCS).with_suffix(""))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        return [self._block(found) for found in BLOCK.finditer(self.text)]

    def _block(self, found: re.Match[str]) -> Block:
        follows = OUTPUT.match(self.text, found.end())
        output, span = (follows[1], follows.span(1)) if follows else (None, None)
        return Block(found[1], found[2], found[3], output, span)

    @property
    def files(self) -> dict[str, str]:
        return {
            block.title: side(block.text, "+") if block.kind == "diff" else block.text
            for block in self.blocks
            if block.title is not None and block.kind in ("python", "diff", "json", "toml")
        }

    @property
    def to_run(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "sh"]


def pages(folder: str) -> list[Page]:
    return [Page(path) for path in sorted((DOCS / folder).glob("*.md"))]


def difference(shown: str, printed: str, *, measured: bool = False) -> str | None:
    """The first shown line that was not printed, in order; None if all were.

    Frames and blanks do not count, and decimals may be off by `NEAR`. `measured` output has times and memory that
    differ from run to run: such numbers are not compared.
    """
    lines = [line for line in printed.splitlines() if line.strip()]
    at, anywhere = 0, False
    for line in shown.splitlines():
        if line.strip() == GAP:
            anywhere = True
        elif line.strip():
            last = len(lines) if anywhere else at + 1
            place = next((i for i in range(at, min(last, len(lines))) if _same(line, lines[i], measured)), None)
            if place is None:
                return f"{line!r} is shown; printed was {lines[at] if at < len(lines) else 'nothing more'!r}"
            at, anywhere = place + 1, False
    return None if at == len(lines) or anywhere else f"{lines[at]!r} is printed, and not shown"


def _same(shown: str, printed: str, measured: bool) -> bool:
    shown, printed = (FRAMES.sub(" ", line).strip() for line in (shown, printed))
    if measured:
        shown, printed = (MEASURED.sub("N", line) for line in (shown, printed))
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=NEAR) for a, b in pairs)
