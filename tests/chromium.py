"""The machine's own Chromium, driven by Playwright; what needs it is skipped where either is missing.

Playwright's own download is not used: Debian's package `chromium` is enough, and `CHROMIUM` may name another one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pages are driven by the package playwright")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine; on Debian, apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=list(QUIET))
        yield browser
        browser.close()


@contextmanager
def visit(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page that must not complain, and must not ask for anything from elsewhere."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | options)
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.complaints = complaints
    yield page
    context.close()
    home = urlsplit(url)
    assert [other for other in asked if urlsplit(other)[:2] != home[:2]] == []
    assert complaints == []


def overflow(page: Any) -> int:
    """Pixels by which a page is wider than its window."""
    found: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return found
