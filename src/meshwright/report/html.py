"""What pages have in common: templates of this folder, which escape whatever they are given, and files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from meshwright.errors import OutputError, one_line
from meshwright.report.charts import policy, scripts


def render_page(name: str, *, has_charts: bool, **shown: Any) -> str:
    """A whole page from a template: with charts it carries the scripts that draw them, and its policy names them."""
    carried = scripts() if has_charts else ()
    return template(name).render(shown, scripts=carried, policy=policy(carried))


def template(name: str) -> Template:
    """A template beside this file."""
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
    """The file, or an error that names it."""
    try:
        # A job's path may hold bytes that are no text; they become references.
        path.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise OutputError(
            f"The {what} was to be written to {str(path)!r}, which failed: {one_line(error)} "
            "Name a file in a folder that is there and can be written to."
        ) from error
