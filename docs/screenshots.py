"""Pictures of the pages, taken anew: `python docs/screenshots.py` (needs Chromium, playwright and pillow)."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the browser is the tests' own

from chromium import open_browser, visit
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
    IMAGES.mkdir(exist_ok=True)
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
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


def main() -> None:
    with TemporaryDirectory() as folder, open_browser() as browser:
        shoot_timeline(browser, folder)
        with served(folder) as url:
            shoot_serve(browser, url)


if __name__ == "__main__":
    main()
