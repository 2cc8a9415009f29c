"""A rehearsal's process ends with a result, whatever happens in it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import tiny_jobs
from meshwright.describe.model import describe
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.rehearse.process import preloaded, rehearse_apart
from meshwright.rehearse.task import RehearsalTask

pytestmark = pytest.mark.slow
TRANSFORMER = f"{Path(tiny_jobs.__file__)}:transformer"
SPOILED = """
import os, signal, time
from dataclasses import replace
import tiny_jobs

def build():
    {line}

job = replace(tiny_jobs.transformer, model=build)
"""


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return describe(tiny_jobs.transformer)


def task(facts: ModelFacts, job: str, strategy: str = "ddp", **changes: object) -> RehearsalTask:
    given = {"job": job, "facts": facts, "strategy": Strategy.parse(strategy).resolve(2), "world": 2, "steps": 1}
    return RehearsalTask(**{**given, **changes})  # type: ignore[arg-type]


def spoiled(folder: Path, line: str) -> str:
    (folder / "tiny_jobs.py").write_text(Path(tiny_jobs.__file__).read_text())
    path = folder / "job.py"
    path.write_text(SPOILED.format(line=line))
    return str(path)


def test_memory_that_runs_out_is_a_result_with_place_and_causes(facts: ModelFacts) -> None:
    whole = rehearse_apart(task(facts, TRANSFORMER), timeout=240)
    assert whole.ran and whole.memory["parameters"] and whole.memory["optimizer"]
    limit = whole.peak - 1
    short = rehearse_apart(task(facts, TRANSFORMER, limit=limit), timeout=240)
    assert short.status == "out of memory"
    assert short.peak_at.phase in ("forward", "backward", "update")
    assert short.peak <= limit < short.peak + short.wanted
    assert sum(short.memory.values()) == short.peak
    assert short.memory["parameters"] == whole.memory["parameters"]


def test_memory_that_runs_out_while_building_is_a_result(facts: ModelFacts) -> None:
    short = rehearse_apart(task(facts, TRANSFORMER, limit=1000), timeout=240)
    assert (short.status, short.peak_at.phase) == ("out of memory", "build")


def test_a_process_that_hangs_is_ended(facts: ModelFacts, tmp_path: Path) -> None:
    found = rehearse_apart(task(facts, spoiled(tmp_path, "time.sleep(3600)")), timeout=5)
    assert found.status == "timeout"
    assert "5 s" in found.reason


def test_a_process_that_is_killed_is_told(facts: ModelFacts, tmp_path: Path) -> None:
    found = rehearse_apart(task(facts, spoiled(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")), timeout=240)
    assert found.status == "killed"
    assert "SIGKILL" in found.reason


def test_an_error_of_the_job_is_told(facts: ModelFacts, tmp_path: Path) -> None:
    found = rehearse_apart(task(facts, spoiled(tmp_path, 'raise ValueError("no such layer")')), timeout=240)
    assert found.status in ("failed", "refused")
    assert "no such layer" in found.reason


def test_what_is_imported_once_exists() -> None:
    """A module that is missing would be ignored, and every rehearsal would import it."""
    pytest.importorskip("transformers")
    assert len(preloaded("hf:folder")) > len(preloaded("job.py"))
    for module in preloaded("hf:folder"):
        assert find_spec(module) is not None
