"""What the README and the first page of the documentation show is run as it is written, in this process."""

from pathlib import Path

import pytest

from page_blocks import ROOT, blocks, commands, side
from page_runner import run_script_alone, run_verb

(DIFF,) = blocks("README.md", "diff")
VERBS = {words[0]: words for block in blocks("README.md", "sh") for words in commands(block)}
STARTED = [words for block in blocks("docs/get-started.md", "sh") for words in commands(block)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the README's job."""
    (tmp_path / "job.py").write_text(side(DIFF, "+"))
    return tmp_path


def test_both_pages_have_the_same_job() -> None:
    assert side(DIFF, "+") == blocks("docs/get-started.md", "python")[0]


def test_the_loop_before_runs_in_plain_pytorch() -> None:
    before = side(DIFF, "-")
    assert "meshwright" not in before
    exec(before, {})


def test_every_block_is_run_here() -> None:
    text = (ROOT / "README.md").read_text()
    # pip install, three commands, make targets; the diff; the script
    assert text.count("\n```sh\n") == 3 and text.count("\n```diff\n") == 1 and text.count("\n```python\n") == 1
    assert set(VERBS) == {"plan", "verify", "train"}
    makefile = (ROOT / "Makefile").read_text()
    for line in blocks("README.md", "sh")[-1].splitlines():
        assert f"\n{line.split()[1]}: " in makefile


@pytest.mark.slow
def test_the_script_runs(folder: Path) -> None:
    (folder / "mine.py").write_text(blocks("README.md", "python")[0])
    run_script_alone(["mine.py"], folder, {})
    assert (folder / "checkpoint").is_dir()


@pytest.mark.slow
def test_train(folder: Path) -> None:
    assert "fsdp=2 on 2 cpu ranks" in run_verb(["meshwright", *VERBS["train"], "--device", "cpu"], folder)


@pytest.mark.slow
def test_verify(folder: Path) -> None:
    assert run_verb(["meshwright", *VERBS["verify"], "--device", "cpu"], folder).count("yes") == 4


@pytest.mark.thorough
def test_plan(folder: Path) -> None:
    assert "Recommended: " in run_verb(["meshwright", *VERBS["plan"]], folder)


@pytest.mark.thorough
def test_get_started(folder: Path) -> None:
    assert [words[0] for words in STARTED].count("train") == 2
    for words in STARTED:
        run_verb(["meshwright", *words], folder)
    assert list((folder / "weights").glob("*.safetensors"))
