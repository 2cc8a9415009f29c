"""A run that runs out of memory ends at once, says where the memory went, and names a strategy that runs."""

import json
import re
from pathlib import Path

import pytest

from meshwright.cli.main import app
from meshwright.cli.outcome import main_with_exit_codes

JOB = Path(__file__).parents[1] / "oom_job.py"


@pytest.mark.slow
@pytest.mark.thorough
def test_the_named_strategy_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(strategy: str, out: str) -> tuple[int, str]:
        words = ("train", str(JOB), "--strategy", strategy, "--ranks", "2", "--steps", "3", "--out", out)
        monkeypatch.setattr("sys.argv", ["meshwright", *words, "--device", "cpu"])
        capfd.readouterr()
        return main_with_exit_codes(app), capfd.readouterr().err

    monkeypatch.chdir(tmp_path)
    # glibc would keep freed tensors, how many depends on timing; a device's allocator gives them to the next ones.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 17))
    code, told = train("ddp", "failed")
    print(told)
    assert code == 2
    assert "restart 1 of" not in told and "Traceback" not in told
    assert re.search(r"error: Rank [01] ran out of memory .* of \d+ MiB \(ulimit -d\)", told)
    assert "MiB: parameters 96.1 MiB, gradients 96.1 MiB, optimizer 192 MiB" in told
    events = [json.loads(line) for line in Path("failed/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["out of memory"]
    found = re.search(r"The nearest strategy that fits is (\S+): .* per step", told)
    assert found is not None
    assert found[1] != "ddp=2"
    code, told = train(found[1], "second")
    print(found[1], told)
    assert code == 0
