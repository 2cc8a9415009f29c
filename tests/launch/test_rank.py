"""Where a started rank begins, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, os, sys
from pathlib import Path
from types import SimpleNamespace
from meshwright.launch.attempt import Attempt
from meshwright.launch.rank import _work

atexit.register(lambda: os._exit(7))  # what is taken down at the end fails
sys.modules["done"] = SimpleNamespace(main=lambda: print("worked"))
attempt = Attempt(Path(sys.argv[1]), 0)
attempt.set_up()
_work("done", attempt)
"""


def test_a_rank_that_has_done_its_work_cannot_fail_any_more(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"RANK": "1"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "worked\n"), done.stderr
    assert (tmp_path / "attempt-0" / "finished-1").exists()
