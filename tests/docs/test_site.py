"""The documentation's site: every link leads somewhere, every page is in the navigation, and it builds offline."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from page_blocks import ROOT

sys.path.append(str(ROOT / "docs"))

import generate
from sitegen import links, navigation
from sitegen.pictures import with_dark_pictures


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("site") / "site-source"


@pytest.fixture(scope="module")
def pages(source: Path) -> list[str]:
    return generate.write_sources(source)


def test_no_link_of_the_site_is_dead(source: Path, pages: list[str]) -> None:
    assert links.dead_links(source, pages) == []


def test_no_link_of_the_repository_is_dead() -> None:
    found = [
        path.relative_to(ROOT).as_posix() for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")
    ]
    assert links.dead_links(ROOT, [*found, *(path.name for path in ROOT.glob("*.md"))]) == []


def test_every_page_is_in_the_navigation(pages: list[str]) -> None:
    placed = [page for found in navigation.navigation(pages).values() for page in found]
    assert len(placed) == len(set(placed))
    assert set(pages) - set(placed) == {page for page in pages if page.startswith("source/")}


def test_only_unwritten_pages_are_missing(pages: list[str]) -> None:
    assert navigation.missing(pages) == []


def test_the_reference_has_every_public_name(source: Path, pages: list[str]) -> None:
    import meshwright
    from meshwright.strategies.term_meanings import term_meanings

    api = (source / "reference/api.md").read_text()
    assert all(f"\n## {name}\n" in api for name in meshwright.__all__)
    assert "### Run.step" in api and "| `global_batch` | `int` |" in api
    cli = (source / "reference/cli.md").read_text()
    verbs = re.findall(r'^app\.command\("(\w+)"', (ROOT / "src/meshwright/cli/main.py").read_text(), flags=re.MULTILINE)
    assert verbs and all(f"\n## {verb}\n" in cli for verb in verbs)
    assert "`--strategy`" in cli
    grammar = (source / "reference/grammar.md").read_text()
    assert all(one.meaning in grammar for one in term_meanings())


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("# A\n[x](b.md) [y](b.md#a-heading-here) [z](#a)\n", 0),
        ("[x](missing.md)\n", 1),
        ("[x](b.md#no-such)\n", 1),
        ("`[x](missing.md)`\n\n```text\n[x](missing.md)\n```\n", 0),
        ('![x](missing.png) <img src="gone.svg">\n', 2),
        ("[x](https://example.org/no)\n", 0),
        ("[x](../outside.md)\n", 1),
    ],
)
def test_dead_links_are_found(tmp_path: Path, text: str, reasons: int) -> None:
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "b.md").write_text("# B\n\n## A `heading`, here\n")
    assert len(links.dead_links(tmp_path, ["a.md", "b.md"])) == reasons


def test_links_move_with_their_page() -> None:
    text = "[a](../examples/gpt.py) `[b](c.md)` [d](#e) [f](jobs.md#g)\n"
    moved = links.rewrite(text, "strategies/x.md", lambda link: {"../examples/gpt.py": "source/gpt.md"}.get(link, link))
    assert moved == "[a](../source/gpt.md) `[b](c.md)` [d](#e) [f](../jobs.md#g)\n"


def test_a_dark_page_shows_the_dark_picture(tmp_path: Path) -> None:
    for name in ("a.png", "a-dark.png", "b.png"):
        (tmp_path / name).touch()
    shown = with_dark_pictures("![x](a.png)\n\n![y](b.png)\n\nin a line ![z](a.png)\n", tmp_path)
    assert shown == "![x](a.png#only-light)\n![x](a-dark.png#only-dark)\n\n![y](b.png)\n\nin a line ![z](a.png)\n"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(source: Path, pages: list[str]) -> None:
    pytest.importorskip("material", reason="the site needs mkdocs-material")
    config = generate.write_config(source, pages)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    site = Path(yaml.safe_load(config.read_text())["site_dir"])
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\"> ]+)")
    for page in pages:
        if page.startswith("source/"):
            continue
        html = (site / page.replace("README.md", "index.md")).with_suffix(".html").read_text()
        assert [url for url in loaded.findall(html) if "canonical" not in url] == [], page
    assert json.loads((site / "search" / "search_index.json").read_text())["docs"]
