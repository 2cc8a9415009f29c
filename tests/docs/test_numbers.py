"""Pictures and numbers of pages are those that the code gives today, and links between pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from page_programs import DOCS, Page, pages

LINK = re.compile(r"\]\(([^)\s]+)\)")
WRITTEN = [page for folder in ("learn", "moving", "comparisons") for page in pages(folder)]


@pytest.fixture(autouse=True)
def scripts_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)


def test_pictures_are_current() -> None:
    import learn_pictures

    drawn = learn_pictures.pictures()
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "learn" / "images").glob("*.svg")}


def test_pictures_show_what_ranks_compute() -> None:
    """What the ranks print is on the page, and another test runs that program."""
    import learn_pictures

    page = Page(DOCS / "learn" / "2-collectives.md")
    (shown,) = [block.output or "" for block in page.to_run]
    for name, collective in learn_pictures.COLLECTIVES.items():
        ranks = "  ".join(f"rank {rank}: {value}" for rank, value in enumerate(collective(learn_pictures.BEFORE)))
        assert f"{name:15} {ranks}" in shown


@pytest.mark.parametrize("place", [0, 1])
def test_numbers_are_the_planners(place: int) -> None:
    import strategy_numbers

    text = strategy_numbers.PAGES[place].read_text(encoding="utf-8")
    assert text.count("<!-- numbers: ") == 1
    assert strategy_numbers.filled(text) == text, "run docs/strategy_numbers.py"


def test_measured_numbers_are_those_of_the_benchmarks() -> None:
    """A benchmark that is measured again changes the comparison with others too."""
    text = (DOCS / "comparisons" / "tools.md").read_text(encoding="utf-8")
    table = text[text.index("## What was measured") : text.index("Times on the H200")]
    measured = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\b\d+\.\d{1,3}\b", re.sub(r"\d+\.\d+ GB\b", "", table))
    assert len(numbers) > 30
    assert [number for number in numbers if number not in measured] == []


@pytest.mark.parametrize("page", WRITTEN, ids=str)
def test_links_lead_somewhere(page: Page) -> None:
    for target in LINK.findall(page.text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page} links to {target}"


def anchors(path: Path) -> set[str]:
    """Names of the headings of a page, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
