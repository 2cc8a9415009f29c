"""What is published names no place that only one machine has."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# One letter of each stands in brackets, so that this file does not match itself.
PRIVATE = re.compile(
    r"(?<![\w.])/(?:[w]ork|[r]oot|[h]ome/\w+|[U]sers/\w+)/"
    r"|[i]ndex-url|[f]ind-links|[t]rusted-host"
    r"|PIP_(?:EXTRA_)?[I]NDEX|UV_(?:DEFAULT_)?[I]NDEX"
    r"|https?://[^/\s@]+:[^/\s@]+[@]"
)


def private_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if PRIVATE.search(line)]


def repository_files() -> list[Path]:
    """Tracked files, and new ones that nothing ignores: those of the next commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout that can be read: {error}")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def test_files_name_no_private_place() -> None:
    files = repository_files()
    assert files
    found = {
        str(path.relative_to(ROOT)): lines
        for path in files
        if (lines := private_lines(path.read_text(encoding="utf-8", errors="ignore")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "parts",
    [
        ("see /", "work/shared/notes.md"),
        ("'/", "root/.config'"),
        ("--extra-", "index-", "url=https://example.org/simple"),
        ("pip install --", "find-", "links wheels"),
        ("https://someone:secret", "@example.org/simple"),
    ],
)
def test_a_private_place_is_found(parts: tuple[str, ...]) -> None:
    assert private_lines("".join(parts)) == ["".join(parts)]


@pytest.mark.parametrize("line", ["https://example.org/docs", "a network/working set", "tests/workers/pool.py"])
def test_an_ordinary_line_passes(line: str) -> None:
    assert private_lines(line) == []
