"""The lines that every exported file begins with."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from meshwright.exchange.subject import Loss, Subject


def comments(subject: Subject, losses: Sequence[Loss], remarks: Sequence[str] = ()) -> str:
    """Where the file came from, what its user should know, and what has no equal in it; each line behind a `#`."""
    nodes = f" in {subject.nodes} nodes" if subject.nodes > 1 else ""
    ranks = f"{subject.ranks} rank{'s' * (subject.ranks > 1)}"
    lines = [f"meshwright export: {subject.strategy} on {ranks}{nodes}.", *remarks]
    if losses:
        lines += ["Without an equal here:", *(f"- {loss}" for loss in losses)]
    return "".join(f"# {line}\n" for text in lines for line in _wrapped(text))


def _wrapped(text: str) -> list[str]:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
