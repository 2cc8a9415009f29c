"""Runs the commands of a documentation page in a folder, in this process and on a pool of ranks.

Starting processes that import torch costs seconds, so `python`, `torchrun` and `meshwright` are not started: scripts
and the command line run where torch is imported already. `run_in_shell` starts them, as a reader does.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from meshwright.assemble.world import World
from page_programs import Block, Page
from rank_pool import RankPool

SOURCE = Path(__file__).parents[1] / "src"
STARTS_RANKS = ("train", "verify", "compare", "probe")
"""Verbs that start processes."""
LIMIT_SECONDS = 600
OR_NOT = " || true"
"""After a command that may exit with 1, such as a plan for which nothing fits."""
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ONE_RANK |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
COLUMNS = "100"
"""Of the terminal that the pages show."""


def starts_ranks(command: str) -> bool:
    words = shlex.split(command, comments=True)
    return words[:1] == ["meshwright"] and words[1] in STARTS_RANKS


def write_files(pages: list[Page], folder: Path) -> None:
    for page in pages:
        for name, text in page.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")


def run_block(block: Block, folder: Path, pool: RankPool) -> str:
    """What its commands print to stdout."""
    return "".join(run_command(command, folder, pool) for command in block.commands)


def run_command(command: str, folder: Path, pool: RankPool) -> str:
    first, *filters = command.split(" | ")
    may_fail = first.endswith(OR_NOT)
    printed = _runner(shlex.split(first.removesuffix(OR_NOT), comments=True), pool, may_fail)(folder)
    for each in filters:
        printed = subprocess.run(["bash", "-c", each], input=printed, capture_output=True, text=True, check=True).stdout
    return printed


def _runner(words: list[str], pool: RankPool, may_fail: bool) -> Callable[[Path], str]:
    if words[:3] == ["torchrun", "--nproc-per-node", "1"]:
        return lambda folder: run_script_alone(words[3:], folder, ONE_RANK)
    if words[:2] == ["torchrun", "--nproc-per-node"]:
        assert int(words[2]) == pool.ranks
        return lambda folder: pool(run_script, words[3:], str(folder))[0]
    if words[0] == "python":
        return lambda folder: run_script_alone(words[1:], folder, {})
    assert words[0] == "meshwright", words
    return lambda folder: run_verb(words, folder, may_fail)


def run_script(world: World, words: list[str], folder: str) -> str:
    """A script on the ranks of a pool, as torchrun would have started it; returns what it prints on this rank."""
    ranks = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.ranks, "LOCAL_WORLD_SIZE": world.ranks}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # they have met already
    nothing = patch.multiple(torch.distributed, init_process_group=_ignore, destroy_process_group=_ignore)
    with nothing:  # the pool keeps its group
        return _execute(words, Path(folder), {key: str(value) for key, value in ranks.items()} | meeting)


def _ignore(*args: Any, **options: Any) -> None:
    """The group is there, and stays."""


def run_script_alone(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """A script in this process, as the only rank.

    Its group is destroyed after everything that uses it. PyTorch may wait for ever if a model's wrapper holds the last
    reference: the group's destructor then holds Python's lock, and joins a thread that needs it to end its message.
    """
    try:
        with patch.object(torch.distributed, "destroy_process_group", _ignore):
            return _execute(words, folder, environment)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _execute(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(folder / words[0])}
    with _inside(folder, words, environment) as printed, torch.random.fork_rng(devices=[]):
        exec(compile((folder / words[0]).read_text(), words[0], "exec"), names)
    return printed.getvalue()


def run_verb(words: list[str], folder: Path, may_fail: bool = False) -> str:
    """What the command line prints to stdout; unless it may fail, it exits with 0."""
    from meshwright.cli.main import app
    from meshwright.cli.outcome import main_with_exit_codes

    with _inside(folder, words, {}) as printed:
        code = main_with_exit_codes(app)
    assert code == 0 or may_fail, f"{shlex.join(words)} exits {code}: {printed.getvalue()}"
    return printed.getvalue()


@contextlib.contextmanager
def _inside(folder: Path, words: list[str], environment: dict[str, str]) -> Iterator[io.StringIO]:
    """In the folder, whose modules can be imported and are forgotten afterwards."""
    before, printed = set(sys.modules), io.StringIO()
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, {**environment, "COLUMNS": COLUMNS}),
        patch.object(sys, "argv", words),
        patch.object(sys, "path", [str(folder), *sys.path]),
        contextlib.redirect_stdout(printed),
    ):
        yield printed
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


def run_in_shell(block: Block, folder: Path) -> str:
    """The block as bash runs it, with processes of its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(SOURCE), "COLUMNS": COLUMNS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-ec", block.text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
