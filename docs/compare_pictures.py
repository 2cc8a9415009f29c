"""Pictures of `compare`, from a document that it printed: `python docs/compare_pictures.py docs/data/compare_gpt.json`.

Needs Chromium, playwright and pillow. A document comes from

    meshwright probe --ranks 4 --out docs/data/cpu_probe.json
    meshwright compare examples/gpt.py --ranks 4 --steps 4 --rounds 1 --on docs/data/cpu_probe.json --json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from screenshots import keep, walk

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the browser is the tests' own

from chromium import open_browser, visit
from meshwright.report.compare_html import write_page
from page_charts import wait_until_drawn

WIDE, NARROW = {"width": 1100, "height": 1000}, {"width": 380, "height": 1400}
PIPELINE = "pp=4:1f1b"


def shoot_page(browser: Any, url: str) -> None:
    shots = {"compare": ("light", WIDE), "compare-dark": ("dark", WIDE), "compare-narrow": ("light", NARROW)}
    for name, (scheme, viewport) in shots.items():
        with visit(browser, url, color_scheme=scheme, viewport=viewport) as page:
            wait_until_drawn(page)
            if name == "compare-dark":
                walk(page, page.locator(".chart").first, ["ArrowRight", "ArrowDown", "ArrowDown"])  # with exact figures
            keep(page.screenshot(), name)


def shoot_timeline(browser: Any, url: str) -> None:
    """One pipeline's step as it was measured, and below it as it had been forecast."""
    with visit(browser, url, viewport=WIDE) as page:
        pipeline = page.locator("details", has=page.locator(f"summary span:text-is('{PIPELINE}')")).first
        pipeline.evaluate("element => { element.open = true }")
        wait_until_drawn(page)
        keep(pipeline.screenshot(), "compare-timeline")


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    with TemporaryDirectory() as folder, open_browser() as browser:
        file = Path(folder) / "compare.html"
        write_page(document, file)
        shoot_page(browser, file.as_uri())
        shoot_timeline(browser, file.as_uri())


if __name__ == "__main__":
    main()
