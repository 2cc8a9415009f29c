"""What an H200 takes for single operators (docs/data/workspaces_gpu.json), as tests read it."""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "docs" / "data" / "workspaces_gpu.json"


def measured(kind: str) -> list[dict[str, Any]]:
    """The rows of "convolutions" or "recurrent" layers."""
    rows: list[dict[str, Any]] = json.loads(_FILE.read_text())[kind]
    return rows
