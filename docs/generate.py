"""Write the sources of the documentation site: `python docs/generate.py build/site-source`, then `mkdocs build`.

`make docs` does both. The pages of docs/ are copied with their links moved to where the site has the targets; the
README becomes the front page; the reference is made from docstrings, help texts, registered terms and schemas.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from posixpath import dirname, join, normpath

import yaml
from sitegen.api_page import api_page
from sitegen.cli_page import cli_page
from sitegen.grammar_page import grammar_page
from sitegen.json_page import json_page
from sitegen.links import dead_links, links_of, rewrite
from sitegen.navigation import missing, navigation, title_of
from sitegen.pictures import with_dark_pictures
from sitegen.source_pages import source_page, source_place

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
"""Pages of the repository outside docs, and their places in the site."""
ASSETS = (".svg", ".png", ".html", ".json", ".css")
TITLES = {"index.md": "Home", "security.md": "Security"}
OVERVIEW = "Overview"
"""The title in the navigation of a folder's README."""


def write_sources(out: Path) -> list[str]:
    """Write all pages; return the places of the Markdown pages."""
    shutil.rmtree(out, ignore_errors=True)
    _copy_assets(out)
    linked: set[str] = set()
    for path, place in _repository_pages().items():
        text = with_dark_pictures((ROOT / path).read_text(encoding="utf-8"), (ROOT / path).parent)
        linked |= {target for _, link in links_of(text) if (target := _target(path, link)) and _is_source(target)}
        _write(out, place, rewrite(text, place, lambda link, path=path: _moved(path, link)))
    for target in sorted(linked):
        _write(out, source_place(target), source_page(ROOT, target))
    for name, text in _reference().items():
        _write(out, f"reference/{name}.md", text)
    return sorted(page.relative_to(out).as_posix() for page in out.rglob("*.md"))


def _repository_pages() -> dict[str, str]:
    """Pages of the repository by path, with their places in the site."""
    docs = {f"docs/{page}": page for path in sorted(DOCS.rglob("*.md")) if (page := path.relative_to(DOCS).as_posix())}
    return {**docs, **ELSEWHERE}


def _copy_assets(out: Path) -> None:
    for path in DOCS.rglob("*"):
        if path.suffix in ASSETS:
            to = out / path.relative_to(DOCS)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)


def _target(path: str, link: str) -> str:
    """The file, relative to the repository's root, that a link of the page at `path` names; "" for an anchor."""
    file = link.partition("#")[0]
    return normpath(join(dirname(path), file)) if file else ""


def _is_source(target: str) -> bool:
    """Whether the site shows this file on a page of its own, because it is neither a page nor an asset."""
    if target in _repository_pages() or not (ROOT / target).exists():
        return False
    return not (target.startswith("docs/") and Path(target).suffix in ASSETS)


def _moved(path: str, link: str) -> str:
    target = _target(path, link)
    if target in ELSEWHERE:
        return ELSEWHERE[target]
    return source_place(target) if _is_source(target) else target.removeprefix("docs/")


def _reference() -> dict[str, str]:
    return {
        "api": api_page(ROOT / "src" / "meshwright"),
        "cli": cli_page(),
        "grammar": grammar_page(),
        "json": json_page(DOCS / "schemas"),
    }


def _write(out: Path, place: str, text: str) -> None:
    path = out / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_config(out: Path, pages: list[str]) -> Path:
    """mkdocs.yml with the navigation of these pages, beside the sources."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config["docs_dir"], config["site_dir"] = str(out.resolve()), str(out.resolve().parent / "site")
    config["nav"] = [
        {section: [{_title(out, page): page} for page in found]} for section, found in navigation(pages).items()
    ]
    path = out.parent / "mkdocs.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def _title(out: Path, page: str) -> str:
    return TITLES.get(page) or (OVERVIEW if page.endswith("/README.md") else title_of(out / page))


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site-source")
    pages = write_sources(out)
    write_config(out, pages)
    if left_out := missing(pages):
        print(f"not in the navigation, because they do not exist: {', '.join(left_out)}")
    dead = dead_links(out, pages)
    print("\n".join([*dead, f"{len(pages)} pages, {len(dead)} dead links"]))
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
