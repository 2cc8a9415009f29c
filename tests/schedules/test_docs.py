"""What docs/schedules.md shows is what its code prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
SNIPPETS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_every_snippet_has_an_output() -> None:
    assert len(SNIPPETS) == PAGE.read_text().count("```python") > 0


@pytest.mark.parametrize(("code", "output"), SNIPPETS)
def test_output(code: str, output: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output
