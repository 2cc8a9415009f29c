"""Every block of code on every page is run by a test, or its page says above it why not: `<!-- not run: why -->`.

Blocks of `python` run with the names of tests/page_setting.py. Commands of `sh`, and lines of `console` after a `$`,
run in a folder with the files that pages name, in this process: quick verbs here, all others under `make thorough`.
They run as written but for what costs time: at most four ranks, few steps, and plans that trace no finalists.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import click
import pytest
import torch
import typer

from meshwright import Strategy
from meshwright.cli.main import app
from page_blocks import ROOT
from page_programs import difference
from page_runner import run_verb
from page_setting import NAMES, run_own_loop, write_setting
from rank_pool import RankPool

FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)
REASON = re.compile(r"<!-- not run: (\S.{10,}) -->\n+$")
OUTPUT = re.compile(r"\n+```text\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(meshwright [a-z]+ [^`\n]*)`")
WORDS_OF_SHELL = ("|", "||", "&&", ">", ";")
QUICK = ("adopt", "export", "layout", "preflight", "validate")
MOST_RANKS = {"train": 4, "verify": 4, "probe": 4, "compare": 2}
"""Of verbs that start them; `compare` starts them for every strategy."""
MAY_EXIT_1 = ("rehearse",)
"""Verbs whose pages show what does not fit."""
RUN_BY_OTHERS = {
    "README.md": "tests/docs/test_readme.py",
    "docs/get-started.md": "tests/docs/test_readme.py",
    "docs/schedules.md": "tests/schedules/test_docs.py",
    "docs/learn": "tests/docs/test_pages.py",
    "docs/moving": "tests/docs/test_pages.py",
    "docs/comparisons": "tests/docs/test_pages.py",
}
"""Pages and folders whose code other tests run; there, `console` is not run."""


@dataclass(frozen=True)
class Block:
    page: str
    kind: str
    title: str | None
    text: str
    reason: str | None
    """Why it is not run."""
    output: str | None
    """What the page says that it prints."""

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0]}"

    @property
    def is_code(self) -> bool:
        return self.kind in ("python", "sh", "bash", "console", "diff") or bool(self.commands)

    @cached_property
    def commands(self) -> list[str]:
        """Lines of a shell; of a session, those after a `$`."""
        lines = [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        if self.kind in ("sh", "bash") or (self.kind == "console" and not self.text.startswith("$ ")):
            return [line for line in lines if not line.startswith("#")]
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]

    @property
    def is_quick(self) -> bool:
        return all(meshwright_words(line)[:1] in ([], *([verb] for verb in QUICK)) for line in self.commands)

    @property
    def runs_here(self) -> bool:
        return self.reason is None and not any(
            self.page == place or self.page.startswith(f"{place}/") for place in RUN_BY_OTHERS
        )


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        reason = REASON.search(text[: fence.start()])
        output = OUTPUT.match(text, fence.end())
        said = (reason[1] if reason else None, output[1] if output else None)
        found.append(Block(page, fence[1], fence[2], fence[3], *said))
    return found


PAGES = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SNIPPETS = [block for block in BLOCKS if block.kind == "python" and block.runs_here]
OWN_LOOPS = [block for block in SNIPPETS if block.page == "docs/own-loops.md"]
SHELL = [block for block in BLOCKS if block.commands and block.runs_here]


def meshwright_words(line: str) -> list[str]:
    """The arguments of `meshwright` in a line of a shell, also behind a launcher; none if it is not called."""
    words = shlex.split(line, comments=True)
    if "meshwright" not in words:
        return []
    words = words[words.index("meshwright") + 1 :]
    end = next((at for at, word in enumerate(words) if word in WORDS_OF_SHELL), len(words))
    return words[:end]


def test_code_is_run_or_says_why_not() -> None:
    """`console` of pages that other tests run is run by none of them; an unmarked block is no code."""
    silent = [
        str(block)
        for block in BLOCKS
        if block.is_code and block.reason is None and not block.runs_here and block.kind in ("console", "bash", "")
    ]
    assert silent == []


def test_pages_that_other_tests_run_are_named_there() -> None:
    for place, test in RUN_BY_OTHERS.items():
        assert (ROOT / place).exists() and Path(place).stem in (ROOT / test).read_text(), place


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.commands], ids=str)
def test_commands_are_spelled_right(block: Block) -> None:
    """Also of blocks that are not run: verbs, options, strategies, scripts, targets of make and extras exist."""
    for line in block.commands:
        check_call(meshwright_words(line))
        check_scripts(shlex.split(line, comments=True))


@pytest.mark.parametrize("page", PAGES)
def test_commands_inside_sentences_are_spelled_right(page: str) -> None:
    for line in INLINE.findall((ROOT / page).read_text(encoding="utf-8")):
        if "..." not in line and not re.search(r"\b[A-Z]{2,}\b(?![-\d])", line):  # nothing is left out or a placeholder
            check_call(meshwright_words(line))


def check_call(words: list[str]) -> None:
    """Parse a call as the command line does, without running it."""
    if not words:
        return
    context = typer.main.get_command(app).make_context("meshwright", words)
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, command, words = context.command.resolve_command(context, rest)
        assert command is not None
        try:
            context = command.make_context(name, words, parent=context)
        except click.MissingParameter:  # a sentence may name the part that it is about
            return
    strategies = [context.params.get("strategy"), *(context.params.get("strategies") or ())]
    if context.params.get("strategies"):
        strategies += context.params["more"] or ()
    for text in strategies:
        if text not in (None, "auto"):
            Strategy.parse(text)


def check_scripts(words: list[str]) -> None:
    if words[:1] == ["make"]:
        assert f"\n{words[1]}: " in (ROOT / "Makefile").read_text()
    elif words[:2] == ["pip", "install"]:
        for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
            assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for script in (word for word in words if re.fullmatch(r"(benchmarks|docs|tests|examples)/\S+\.py", word)):
        text = (ROOT / script).read_text()
        if script.startswith("benchmarks/") and "python" in words:
            imported = [ROOT / "benchmarks" / f"{name}.py" for name in re.findall(r"^from (\w+) import", text, re.M)]
            text += "".join(path.read_text() for path in imported if path.exists())  # whose options it takes
            missing = [word for word in words if word.startswith("--") and f'"{word}"' not in text]
            assert missing == [], script


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in SNIPPETS if block not in OWN_LOOPS], ids=str)
def test_snippet(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        names, check = NAMES[block.page](tmp_path)
        exec(block.text, names)
        check(names)
    finally:
        if torch.distributed.is_initialized():  # a run in this process keeps its group
            torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("block", OWN_LOOPS[1:], ids=str)  # tests/ranks/test_own_loop_docs.py runs the first
def test_own_loop(block: Block, two_ranks: RankPool) -> None:
    two_ranks(run_own_loop, block.text)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in SHELL if block.is_quick}))
def test_quick_commands(page: str, tmp_path: Path) -> None:
    run_blocks(page, tmp_path, [block for block in SHELL if block.page == page and block.is_quick])


@pytest.mark.thorough
@pytest.mark.timeout(3600)  # a page may start ranks thirty times
@pytest.mark.parametrize("page", sorted({block.page for block in SHELL if not block.is_quick}))
def test_all_commands(page: str, tmp_path: Path) -> None:
    """In order, and in one folder: later commands read what earlier ones wrote."""
    run_blocks(page, tmp_path, [block for block in SHELL if block.page == page])


def run_blocks(page: str, folder: Path, blocks: list[Block]) -> None:
    write_setting(page, folder)
    for block in blocks:
        if "engine=deepspeed" in block.text and importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed")
        printed = "".join(run_line(line, folder) for line in block.commands)
        if block.output is not None:
            assert difference(block.output, printed) is None, block


def run_line(line: str, folder: Path) -> str:
    words = meshwright_words(line)
    if not words:
        return ""  # make and pip, which are only checked
    printed = run_verb(["meshwright", *smaller(words)], folder, may_fail=words[0] in MAY_EXIT_1)
    rest = shlex.split(line, comments=True)
    if ">" in rest:
        (folder / rest[rest.index(">") + 1]).write_text(printed)
    return printed


def smaller(words: list[str]) -> list[str]:
    """The same call with fewer ranks and steps."""
    words = list(words)
    for at, word in enumerate(words[:-1]):
        if word == "--ranks" and int(words[at + 1]) > MOST_RANKS.get(words[0], int(words[at + 1])):
            words[at + 1] = "2"
        elif word == "--steps":
            words[at + 1] = str(2 + int(words[at + 1]) // 1000)
    more = {"train": ["--steps", "2"], "plan": ["--fast"], "compare": ["--rounds", "1", "--steps", "2"]}
    if words[0] == "train" and ("--steps" in words or "--epochs" in words):
        return words
    return words + more.get(words[0], [])
