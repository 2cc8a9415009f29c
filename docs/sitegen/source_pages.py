"""Pages that show files of the repository which other pages link to."""

from __future__ import annotations

import json
from pathlib import Path

LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".md": "markdown", ".csv": "text", ".sh": "sh"}


def source_place(path: str) -> str:
    """Where the site has a file of the repository."""
    return f"source/{path}.md"


def source_page(root: Path, path: str) -> str:
    """A file, or the list of a folder's files."""
    target = root / path
    if target.is_dir():
        files = sorted(file.name for file in target.iterdir() if file.is_file())
        return f"# `{path}/`\n\n" + "\n".join(f"- `{name}`" for name in files) + "\n"
    if target.suffix == ".ipynb":
        return f"# `{path}`\n\n" + _notebook(target)
    fence = "````"
    text = target.read_text(encoding="utf-8")
    language = LANGUAGES.get(target.suffix, "text")
    return f"# `{path}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _notebook(path: Path) -> str:
    """A notebook's cells as Markdown; its headings go one level down."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text.replace("# ", "## ", 1))
    return "\n\n".join(parts) + "\n"
