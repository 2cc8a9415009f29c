"""The reference of the documents that `--json` prints, from the schemas under docs/schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEAD = """# JSON documents

Every verb prints one document with `--json`. These are their [JSON Schemas](https://json-schema.org) (draft 2020-12),
taken from real documents; tests hold the verbs to them. Fields may be added; a field that is required here keeps its
name and type within a minor version."""


def json_page(folder: Path) -> str:
    parts = [LEAD]
    for path in sorted(folder.glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        lines = ["| field | type |", "| --- | --- |", *_rows(schema, "")]
        raw = f"[{path.name}](../schemas/{path.name})"
        parts += [f"## {schema['title']}", f"`{schema['description']}` ({raw})", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _rows(schema: dict[str, Any], path: str) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        optional = "" if name in schema.get("required", ()) else ", may be missing"
        yield f"| `{here}` | {_kind(field)}{optional} |"
        yield from _inner(field, here)


def _inner(field: dict[str, Any], here: str) -> Iterator[str]:
    """Fields of an object, and of the objects in a list or a map."""
    if "properties" in field:
        yield from _rows(field, here)
    if "properties" in field.get("items", {}):
        yield from _rows(field["items"], f"{here}[]")
    values = field.get("additionalProperties")
    if isinstance(values, dict) and "properties" in values:
        yield from _rows(values, f"{here}.*")


def _kind(field: dict[str, Any]) -> str:
    kinds = field.get("type", "any")
    named = " or ".join(kinds if isinstance(kinds, list) else [kinds])
    if "items" in field:
        return f"{named} of {_kind(field['items'])}"
    values = field.get("additionalProperties")
    return f"{named} from name to {_kind(values)}" if isinstance(values, dict) else named
