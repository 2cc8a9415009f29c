"""Write the comment at the top of every exported file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from meshwright.exchange.export_request import ExportRequest, Unsupported


def comments(request: ExportRequest, losses: Sequence[Unsupported], remarks: Sequence[str] = ()) -> str:
    """The file's origin, remarks for its user, and the terms without an equal; each line starts with `#`."""
    nodes = f" in {request.nodes} nodes" if request.nodes > 1 else ""
    ranks = f"{request.ranks} rank{'s' * (request.ranks > 1)}"
    lines = [f"meshwright export: {request.strategy} on {ranks}{nodes}.", *remarks]
    if losses:
        lines += ["Without an equal here:", *(f"- {loss}" for loss in losses)]
    return "".join(f"# {line}\n" for text in lines for line in _wrapped(text))


def _wrapped(text: str) -> list[str]:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
