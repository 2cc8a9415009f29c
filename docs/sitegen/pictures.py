"""Pictures on dark pages: where `plan.png` has a `plan-dark.png` beside it, the site shows the one for its theme.

Pages of the repository name only the first. Material hides the other by what follows the `#`.
"""

from __future__ import annotations

import re
from pathlib import Path

PICTURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+)\.png\)$", flags=re.MULTILINE)


def with_dark_pictures(text: str, folder: Path) -> str:
    """A page's text with both versions of every picture that is a paragraph; `folder` is the page's."""

    def both(found: re.Match[str]) -> str:
        words, path = found.groups()
        if not (folder / f"{path}-dark.png").exists():
            return found[0]
        return f"![{words}]({path}.png#only-light)\n![{words}]({path}-dark.png#only-dark)"

    return PICTURE.sub(both, text)
