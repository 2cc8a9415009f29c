"""Run the commands of pages and write what they print into the pages.

PYTHONPATH=src python docs/fill_outputs.py docs/learn/3-dp-and-ddp.md [...]

A page says with an empty block `text` after a block `sh` where output belongs. Output that is still right, also with
lines left out (`...`), stays as it is.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the pages are run as their test runs them

from page_programs import Page, difference, pages
from page_runner import run_block, run_in_shell, starts_ranks, write_files
from rank_pool import RankPool


def fill(page: Page, pool: RankPool) -> str:
    """The page's text with the outputs of this run."""
    text, moved = page.text, 0
    with tempfile.TemporaryDirectory(prefix="meshwright-docs-") as folder:
        write_files([*pages(page.path.parent.name), page], Path(folder))
        for block in page.to_run:
            measured = any(map(starts_ranks, block.commands))
            printed = run_in_shell(block, Path(folder)) if measured else run_block(block, Path(folder), pool)
            if block.output_span is None or difference(block.output or "", printed, measured=measured) is None:
                continue
            start, end = (place + moved for place in block.output_span)
            text = text[:start] + tidy(printed) + text[end:]
            moved += len(tidy(printed)) - (end - start)
    return text


def tidy(printed: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())


def main() -> None:
    pool, failed = RankPool(2), None
    for name in sys.argv[1:]:
        page = Page(Path(name).resolve())
        try:
            page.path.write_text(fill(page, pool), encoding="utf-8")
        except Exception:  # the other pages can be written all the same
            failed = traceback.format_exc()
            print(f"{name} is left as it was:\n{failed}", file=sys.stderr)
    pool.close()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
