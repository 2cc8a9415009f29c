"""Programs of docs/learn and docs/moving print what the pages show, and train alike before and after a move."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from page_blocks import side
from page_programs import Block, Page, difference, pages
from page_runner import run_block, run_in_shell, starts_ranks, write_files
from rank_pool import RankPool

LEARN, MOVING, COMPARISONS = (
    [page for page in pages(folder) if page.to_run] for folder in ("learn", "moving", "comparisons")
)
PACKAGES = ("accelerate", "deepspeed", "lightning", "transformers")
"""Others' packages that pages use; a page whose package is not installed is skipped."""
LOSS = re.compile(r"^step (\d+): loss ([\d.]+)$", flags=re.MULTILINE)
CLOSE = 1e-4


def skip_without_packages(page: Page) -> None:
    text = "\n".join([*page.files.values(), *(block.text for block in page.to_run)])
    for package in PACKAGES:
        used = re.search(rf"^(?:import|from) {package}\b|engine={package}", text, flags=re.MULTILINE)
        if used and importlib.util.find_spec(package) is None:
            pytest.skip(f"{page} needs {package}, which is not installed")


def is_quick(block: Block) -> bool:
    """Whether it neither starts processes nor searches for plans."""
    return not any(starts_ranks(command) or " plan " in command for command in block.commands)


def prepare(page: Page, folder: Path) -> None:
    skip_without_packages(page)
    write_files([*pages(page.path.parent.name), page], folder)


def check_output(page: Page, block: Block, printed: str) -> None:
    if block.output is not None:
        measured = any(map(starts_ranks, block.commands))
        problem = difference(block.output, printed, measured=measured)
        assert problem is None, f"{page}, {block.commands[0]}: {problem}; see docs/fill_outputs.py"


def run_quick_blocks(page: Page, folder: Path, pool: RankPool) -> dict[str, str]:
    """What each quick block prints, by its first command; compared with what the page shows."""
    prepare(page, folder)
    printed = {}
    for block in filter(is_quick, page.to_run):
        printed[block.commands[0]] = run_block(block, folder, pool)
        check_output(page, block, printed[block.commands[0]])
    return printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.thorough if "deepspeed" in str(page) else ()) for page in LEARN],
    ids=str,
)
def test_programs_of_the_course(page: Page, two_ranks: RankPool, tmp_path: Path) -> None:
    run_quick_blocks(page, tmp_path, two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in MOVING if "before.py" in page.files], ids=str)
def test_before_and_after_train_alike(page: Page, two_ranks: RankPool, tmp_path: Path) -> None:
    printed = run_quick_blocks(page, tmp_path, two_ranks)
    before = losses_of(printed, "before.py")
    assert [step for step, _ in before] == list(range(1, 9))
    if "after.py" in page.files:
        assert_close(losses_of(printed, "after.py"), before)
    moved = losses_of(printed, "go_on.py")
    assert moved and len(moved) % 4 == 0
    for start in range(0, len(moved), 4):  # one stretch for each strategy
        assert_close(moved[start : start + 4], before[4:])


def losses_of(printed: dict[str, str], script: str) -> list[tuple[int, float]]:
    text = "".join(output for command, output in printed.items() if script in command)
    return [(int(step), float(loss)) for step, loss in LOSS.findall(text)]


def assert_close(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> None:
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=CLOSE)


@pytest.mark.thorough
@pytest.mark.timeout(3600)  # a page may start ranks ten times
@pytest.mark.parametrize("page", [*LEARN, *MOVING, *COMPARISONS], ids=str)
def test_commands_as_a_reader_runs_them(page: Page, tmp_path: Path) -> None:
    prepare(page, tmp_path)
    for block in page.to_run:
        check_output(page, block, run_in_shell(block, tmp_path))


@pytest.mark.parametrize("page", [page for page in MOVING if "after.py" in page.files], ids=str)
def test_a_diff_starts_from_the_script(page: Page) -> None:
    diff = next(block.text for block in page.blocks if block.title == "after.py")
    assert side(diff, "-") == page.files["before.py"]


def test_every_chapter_runs_on_two_ranks() -> None:
    chapters = [page for page in LEARN if page.path.name[0].isdigit()]
    assert len(chapters) == 8
    for page in chapters:
        shown = [block for block in page.to_run if "torchrun --nproc-per-node 2" in block.text]
        assert shown and all(block.output and block.output.strip() for block in shown), page
