"""Take the pictures of pages anew (needs Chromium, playwright and pillow).

make docs && python docs/screenshots.py site   # the documentation's main pages
python docs/screenshots.py plan timeline serve
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the browser is the tests' own

from chromium import open_browser, overflow, visit
from page_charts import wait_until_drawn

IMAGES = Path(__file__).parent / "images"
SHOTS = {"serve": ("light", 1280, 940), "serve-dark": ("dark", 1280, 940), "serve-narrow": ("light", 380, 1500)}
PIPELINE = "zero1=2,pp=4:1f1b,bf16,ac=full,mb=1"


@contextmanager
def served(folder: str) -> Iterator[str]:
    command = [sys.executable, "-m", "meshwright", "serve", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as server:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["url"]
        server.terminate()


def keep(picture: bytes, name: str) -> None:
    """Few colours are enough for a page, and make a small file."""
    (IMAGES / name).parent.mkdir(exist_ok=True)
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        IMAGES / f"{name}.png", optimize=True
    )


def walk(page: Any, chart: Any, keys: list[str]) -> None:
    """As somebody does who has no mouse, until the chart tells its figures."""
    chart.evaluate("chart => chart.focus({ preventScroll: true })")
    for key in keys:
        page.keyboard.press(key)
        page.wait_for_selector(".hoverlayer .hovertext")


def shoot_serve(browser: Any, url: str) -> None:
    for name, (scheme, width, height) in SHOTS.items():
        with visit(browser, url, color_scheme=scheme, viewport={"width": width, "height": height}) as page:
            page.wait_for_selector("#answer[aria-busy=false] .answer", timeout=120_000)
            wait_until_drawn(page)
            if width < 600:
                page.evaluate("document.querySelector('.command').scrollIntoView()")
            keep(page.screenshot(), name)


def shoot_timeline(browser: Any, folder: str) -> None:
    file = Path(folder) / "timeline.html"
    command = ["plan", "preset:llama3-8b", "--on", "8xH100-80GB", "--batch", "16", "--strategies", PIPELINE, "--fast"]
    subprocess.run([sys.executable, "-m", "meshwright", *command, "--timeline", str(file)], check=True)
    for scheme, name in (("light", "timeline"), ("dark", "timeline-dark")):
        with visit(browser, file.as_uri(), color_scheme=scheme, viewport={"width": 1100, "height": 500}) as page:
            wait_until_drawn(page)
            if scheme == "dark":
                walk(page, page.locator(".chart").first, ["ArrowRight"] * 4)  # with what a piece tells
            keep(page.locator("main").screenshot(), name)


def shoot_plan(browser: Any, folder: str) -> None:
    file = Path(folder) / "plan.html"
    if not file.exists():
        command = ["plan", "preset:llama3-8b", "--on", "8xH100-80GB", "--fast", "--top", "6", "--html", str(file)]
        subprocess.run([sys.executable, "-m", "meshwright", *command], check=True)
    for scheme, name in (("light", "plan"), ("dark", "plan-dark")):
        with visit(browser, file.as_uri(), color_scheme=scheme, viewport={"width": 1000, "height": 850}) as page:
            wait_until_drawn(page)
            keep(page.screenshot(), name)


SITE = Path(__file__).parents[1] / "build" / "site"
SITE_PAGES = {
    "home": "index.html",
    "get-started": "get-started.html",
    "learn": "learn/1-why.html",
    "strategy": "strategies/fsdp.html",
    "planner": "planner.html",
    "cli": "reference/cli.html",
    "comparison": "comparisons/strategies.html",
}
PICTURED = ("learn",)
"""Pages that are shown from their first picture on."""
SITE_WIDTHS = {"": (1280, 800), "-phone": (360, 740)}


@contextmanager
def served_files(folder: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def shoot_site(browser: Any, home: str) -> None:
    """The first screen of the main pages, wide and on a phone, light and dark."""
    for scheme in ("light", "dark"):
        for suffix, (width, height) in SITE_WIDTHS.items():
            for name, file in SITE_PAGES.items():
                window = {"width": width, "height": height}
                with visit(browser, f"{home}/{file}", color_scheme=scheme, viewport=window) as page:
                    page.wait_for_load_state()
                    assert overflow(page) <= 0, f"{file} is wider than {width} pixels"
                    if name in PICTURED:
                        page.evaluate(
                            "scrollBy(0, document.querySelector('article img').getBoundingClientRect().y - 160)"
                        )
                    keep(page.screenshot(), f"site/{name}{suffix}{'-dark' if scheme == 'dark' else ''}")


def main(wanted: list[str]) -> None:
    with TemporaryDirectory() as folder, open_browser() as browser:
        if "site" in wanted:
            with served_files(SITE) as home:
                shoot_site(browser, home)
        if "plan" in wanted:
            shoot_plan(browser, folder)
        if "timeline" in wanted:
            shoot_timeline(browser, folder)
        if "serve" in wanted:
            with served(folder) as url:
                shoot_serve(browser, url)


if __name__ == "__main__":
    main(sys.argv[1:] or ["site", "plan", "timeline", "serve"])
