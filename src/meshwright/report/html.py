"""Shared by all pages: templates of this folder, which escape all input, and writing files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from meshwright.errors import OutputError, one_line
from meshwright.report.charts import policy, scripts


def render_page(name: str, *, has_charts: bool, **shown: Any) -> str:
    """Render a whole page; with charts it includes the scripts that draw them, and its policy allows those."""
    carried = scripts() if has_charts else ()
    return template(name).render(shown, scripts=carried, policy=policy(carried))


def template(name: str) -> Template:
    """A template in this folder."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("meshwright", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write_file(text: str, path: Path, *, what: str = "page") -> None:
    """Write a file; the error names it."""
    try:
        # A job's path may hold bytes that are not text; they become character references.
        path.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise OutputError(
            f"Cannot write the {what} to {str(path)!r}: {one_line(error)} Give a path in an existing, writable folder."
        ) from error
