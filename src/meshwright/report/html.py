"""Shared by all pages: templates of this folder, which escape all input, and writing files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template

from meshwright.errors import OutputError, one_line
from meshwright.report.charts import policy, scripts


def render_page(name: str, *, has_charts: bool, **shown: Any) -> str:
    """Render a whole page; with charts it includes the scripts that draw them, and its policy allows those."""
    included = scripts() if has_charts else ()
    return template(name).render(shown, scripts=included, policy=policy(included))


def template(name: str) -> Template:
    return environment("report").get_template(name)


@cache
def environment(*folders: str) -> Environment:
    """The templates of some of the package's folders; they escape all input."""
    return Environment(
        loader=ChoiceLoader([PackageLoader("meshwright", folder) for folder in folders]),
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
