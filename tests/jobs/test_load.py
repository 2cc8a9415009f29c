"""From a file to a job, and what is said where there is none."""

import sys
from pathlib import Path

import pytest

from meshwright.errors import JobError, UnknownTerm
from meshwright.facts.job import Job
from meshwright.jobs.load import load_job

JOB = "Job(model=f, inputs=f, loss=f, optimizer=f, global_batch={size})"
HEAD = "from meshwright import Job\ndef f(*parts): ...\n"


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a job adds its folder to the path; the next test should not find it there."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(folder: Path, text: str, name: str = "file.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def refused(text: str) -> str:
    with pytest.raises(JobError) as caught:
        load_job(text)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_variable_job(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, f"{HEAD}job = {JOB.format(size=3)}"))
    assert isinstance(job, Job)
    assert job.global_batch == 3


def test_another_variable(tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEAD}job = {JOB.format(size=3)}\nlarge = {JOB.format(size=5)}")
    assert load_job(f"{path}:large").global_batch == 5


def test_a_path_with_a_colon(tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEAD}job = {JOB.format(size=3)}", name="a:b.py")
    assert load_job(path).global_batch == 3


def test_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "SIZE = 7", name="neighbour_of_a_job.py")
    path = write(tmp_path, f"from neighbour_of_a_job import SIZE\n{HEAD}job = {JOB.format(size='SIZE')}")
    assert load_job(path).global_batch == 7


def test_no_file(tmp_path: Path) -> None:
    message = refused(str(tmp_path / "nowhere.py"))
    assert "nowhere.py" in message
    assert "variable `job`" in message


def test_a_folder(tmp_path: Path) -> None:
    assert str(tmp_path) in refused(str(tmp_path))


def test_not_python(tmp_path: Path) -> None:
    assert "not a Python file" in refused(write(tmp_path, "job", name="job.txt"))


def test_no_job(tmp_path: Path) -> None:
    message = refused(write(tmp_path, "other = 3"))
    assert "no variable 'job'" in message
    assert "write `job = Job(...)`" in message


def test_no_job_but_another(tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEAD}small = {JOB.format(size=1)}")
    assert f"it has small: write {path}:small" in refused(path)


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEAD}job = {JOB.format(size=1)}")
    message = refused(f"{path}:jbo")
    assert "no variable 'jbo'" in message
    assert f"write {path}:job" in message


def test_not_a_job(tmp_path: Path) -> None:
    message = refused(write(tmp_path, "job = {'model': 3}"))
    assert "job is dict" in message
    assert "meshwright.Job" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("job = 1 / 0", "ZeroDivisionError"),
        ("job = (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_raises(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    message = refused(path)
    assert f"{path} cannot be imported" in message
    assert part in message


def test_an_error_of_our_own_passes_through(tmp_path: Path) -> None:
    with pytest.raises(UnknownTerm):
        load_job(write(tmp_path, "import meshwright as mw\nmw.Strategy.parse('fsdpp')"))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": 3}, "Job(model=...) must be a function, but it is int"),
        ({"loss": None}, "Job(loss=...) must be a function, but it is NoneType"),
        ({"global_batch": 0}, "Job(global_batch=...) must be a whole number of samples, but it is 0"),
        ({"global_batch": True}, "it is True"),
        ({"global_batch": 2.0}, "it is 2.0"),
        ({"max_norm": 0}, "Job(max_norm=...) must be above 0"),
        ({"max_norm": float("nan")}, "it is nan"),
    ],
)
def test_a_job_checks_its_parts(parts: dict[str, object], message: str) -> None:
    whole = {"model": print, "inputs": print, "loss": print, "optimizer": print, "global_batch": 4}
    with pytest.raises(JobError) as caught:
        Job(**whole | parts)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_jobs_without_a_python_file() -> None:
    assert load_job("preset:gpt2:batch=3").global_batch == 3
    assert "There is no config nowhere.json" in refused("hf:nowhere.json")
    assert "Did you mean preset:gpt2?" in refused("preset:gtp2")
