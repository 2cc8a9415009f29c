"""`probe --kernels` and `plan --kernels` as a user calls them. No time is asserted."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from job_text import JOB
from meshwright.api import probe_kernels
from meshwright.cli.main import app
from meshwright.errors import BadInput, OutputError, Unreadable
from meshwright.facts.kernel_table import KernelTable, read_tables, write_tables

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job, and the kernels of its step measured on this CPU."""
    found = tmp_path_factory.mktemp("kernels")
    (found / "job.py").write_text(JOB)
    done = RUNNER.invoke(
        app, ["probe", "--kernels", str(found / "job.py"), "--device", "cpu", "--out", str(found / "k.json"), "--json"]
    )
    assert done.exit_code == 0, done.output
    (found / "document.json").write_text(done.stdout)
    return found


def test_the_document_and_the_file_have_every_operator(folder: Path) -> None:
    document = json.loads((folder / "document.json").read_text())
    (table,) = read_tables(folder / "k.json")
    assert document["measured"] == document["operators"] == len(table.kernels) > 5
    assert document["failed"] == [] and document["known"] == 0
    assert {"addmm", "relu", "threshold_backward", "mm"} <= {kernel.name for kernel in table.kernels}
    assert [update.optimizer for update in table.updates] == ["SGD"]
    assert table.updates[0].elements == 4 * 8 + 8 + 8 * 2 + 2
    assert table.device == "cpu" and table.host > 0 and table.step > 0


def test_a_second_probe_measures_only_what_is_new(folder: Path) -> None:
    arguments = ["probe", "--kernels", str(folder / "job.py"), "--device", "cpu", "--json"]
    again = RUNNER.invoke(app, [*arguments, "--out", str(folder / "k.json"), "--strategy", "single", "--batch", "16"])
    assert again.exit_code == 0, again.output
    document = json.loads(again.stdout)
    assert document["known"] > 0 and document["measured"] > 0
    (table,) = read_tables(folder / "k.json")
    assert len(table.kernels) == len({kernel.signature for kernel in table.kernels}) > document["operators"]


def test_a_plan_says_what_was_measured(folder: Path) -> None:
    arguments = ["plan", str(folder / "job.py"), "--on", "1xcpu", "--strategies", "single", "--fast"]
    plain = json.loads(RUNNER.invoke(app, [*arguments, "--json"]).stdout)["plans"][0]
    assert plain["time_grade"] == "catalogue" and plain["kernels"] == {}
    done = RUNNER.invoke(app, [*arguments, "--kernels", str(folder / "k.json"), "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)["plans"][0]
    assert plan["time_grade"] == "measured kernels"
    assert sum(plan["kernels"].values()) == pytest.approx(1.0) and plan["kernels"]["exact"] > 0.9
    assert plan["memory"] == plain["memory"]
    shown = RUNNER.invoke(app, [*arguments, "--kernels", str(folder / "k.json")], env={"COLUMNS": "300"})
    assert "measured kernels: " in shown.stdout and "% measured" in shown.stdout


def test_a_host_can_be_timed_without_a_device(folder: Path) -> None:
    arguments = ["plan", str(folder / "job.py"), "--on", "1xH200", "--strategies", "single,bf16", "--fast", "--json"]
    done = RUNNER.invoke(app, [*arguments, "--time-host"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plans"][0]["time"]["host"] > 0


def test_kernels_of_another_torch_are_used_and_told(folder: Path, tmp_path: Path) -> None:
    (table,) = read_tables(folder / "k.json")
    other = KernelTable(**{**vars(table), "torch": "2.1.0"})
    write_tables(tmp_path / "other.json", [other])
    arguments = ["plan", str(folder / "job.py"), "--on", "1xcpu", "--strategies", "single", "--fast", "--json"]
    found = json.loads(RUNNER.invoke(app, [*arguments, "--kernels", str(tmp_path / "other.json")]).stdout)
    assert any("measured with torch 2.1.0" in note for note in found["advice"])
    assert found["plans"][0]["time_grade"] == "measured kernels"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["probe", "--strategy", "single"], BadInput, "--strategy belongs to --kernels JOB"),
        (["probe", "--kernels", "job.py", "--ranks", "2"], BadInput, "leave --ranks out"),
        (["probe", "--kernels", "job.py", "--out", "k.txt"], OutputError, "must be a .json file"),
        (["probe", "--kernels", "job.py", "--out", "none/k.json"], OutputError, "must be a .json file"),
        (["plan", "job.py", "--on", "1xcpu", "--kernels", "missing.json"], Unreadable, "missing.json"),
        (["plan", "job.py", "--on", "1xcpu", "--kernels", "job.py"], Unreadable, "job.py"),
        (["plan", "job.py", "--on", "1xH200", "--kernels", "k.json"], BadInput, "the cluster's device is H200"),
    ],
)
def test_mistakes_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: type[Exception], words: str
) -> None:
    monkeypatch.chdir(folder)
    found = RUNNER.invoke(app, arguments)
    assert isinstance(found.exception, error), found.output
    assert words in str(found.exception)


def test_a_file_that_is_wrong_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    path.write_text("[]")
    with pytest.raises(Unreadable):
        probe_kernels.probe_kernels(probe_kernels.KernelRequest(job=str(folder / "job.py"), out=path, device="cpu"))
    assert path.read_text() == "[]"
