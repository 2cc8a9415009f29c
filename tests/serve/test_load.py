"""The server under load from this machine: every request is answered, and memory stays where it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"


@pytest.mark.slow
def test_a_thousand_requests_beside_three_hundred_idle_connections() -> None:
    pytest.importorskip("uvicorn", reason="the page needs meshwright[serve]")
    command = [
        sys.executable,
        str(SCRIPT),
        "--requests",
        "1000",
        "--connections",
        "20",
        "--settings",
        "8",
        "--idle",
        "300",
    ]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)
    assert found["requests"] == 1000
    assert found["errors"] == []
    assert found["growth"] < 0.05
