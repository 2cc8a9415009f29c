"""Documents of --json are as docs/schemas says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from page_blocks import ROOT

sys.path.append(str(ROOT / "docs"))

import schemas

from meshwright.cli import checkpoint
from meshwright.cli.main import app

jsonschema = pytest.importorskip("jsonschema", reason="documents are checked by the package jsonschema")
QUICK = (
    *("adopt", "export", "layout", "preflight", "validate"),
    *("checkpoint show", "checkpoint check", "checkpoint export", "checkpoint import"),
)
FILES = {json.loads(path.read_text())["title"]: path for path in sorted((ROOT / "docs" / "schemas").glob("*.json"))}


def check(title: str, folder: Path) -> None:
    schema = json.loads(FILES[title].read_text())
    for command in schemas.COMMANDS[title]:
        jsonschema.validate(schemas.document(command, folder), schema)


def test_every_title_has_a_file() -> None:
    assert set(FILES) == set(schemas.COMMANDS)


def test_every_verb_has_a_schema() -> None:
    verbs = {command.name for command in app.registered_commands}
    verbs |= {f"checkpoint {command.name}" for command in checkpoint.app.registered_commands}
    assert verbs == {title.partition(" --")[0] for title in FILES}


@pytest.mark.slow
def test_quick_verbs(tmp_path: Path) -> None:
    """In this process, one after another: later ones read what earlier ones wrote."""
    schemas.prepare(tmp_path)
    for title in QUICK:
        check(title, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("title", [title for title in schemas.COMMANDS if title not in QUICK])
def test_other_verbs(title: str, tmp_path: Path) -> None:
    schemas.prepare(tmp_path)
    check(title, tmp_path)


@pytest.mark.parametrize(
    ("values", "other"),
    [
        ([{"a": 1, "b": "x"}, {"a": None}], {"b": "x"}),
        ([{"a": [{"c": 1}]}], {"a": [{}]}),
        ([{"time": {"compute": 1.0}}], {"time": {"data": "long"}}),
    ],
)
def test_a_schema_takes_its_documents_and_refuses_others(values: list[Any], other: Any) -> None:
    schema = schemas.schema_of(values)
    for value in values:
        jsonschema.validate(value, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(other, schema)


def test_names_of_causes_are_free() -> None:
    jsonschema.validate({"time": {"other cause": 2}}, schemas.schema_of([{"time": {"compute": 1.0}}]))
