"""Code blocks of Markdown pages."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import meshwright

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page in one language; `page` is a path from the repository's root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def side(diff: str, sign: str) -> str:
    """One side of a diff: "-" before it, "+" after it."""
    lines = diff.splitlines()
    assert all(not line or line[0] in " +-" for line in lines)
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in (sign, " ", ""))


def commands(block: str) -> list[list[str]]:
    """The arguments of each `meshwright` command of a shell block."""
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [words[1:] for words in lines if words and words[0] == "meshwright"]


def environment() -> dict[str, str]:
    """For a process in another folder: it imports the same Meshwright as this one."""
    return {**os.environ, "PYTHONPATH": str(Path(meshwright.__file__).parents[1])}
