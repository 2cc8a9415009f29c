"""Every broken model is found with its name and place; nothing is said about sound ones."""

from __future__ import annotations

import json
import linecache
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broken_models import BROKEN, SOUND, net, with_model
from job_text import JOB
from meshwright.cli.main import app
from meshwright.commands.preflight import examine_job, merged, tell_findings
from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.facts.finding import Finding
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.report.preflight import findings_page

MEAN = "job = Job(**{**parts, 'loss': lambda o, b: (((o - b['y']) ** 2).mean(), len(o))}, global_batch=8)"
LAZY = "job = Job(**{**parts, 'model': lambda: nn.LazyLinear(2)}, global_batch=8)"

_FACTS: dict[int, ModelFacts] = {}


def examined(job: Job, text: str | None) -> list[Finding]:
    """The findings; a job is described once for all strategies."""
    with suppress(JobError):
        if id(job) not in _FACTS:
            _FACTS[id(job)] = describe(job)
    return examine_job(job, None if text is None else Strategy.parse(text), facts=_FACTS.get(id(job)))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_found(name: str) -> None:
    job, kind, module, text, strategy = BROKEN[name]
    found = examined(job, strategy)
    finding = next(one for one in found if one.kind == kind)
    assert finding.module == module
    assert text in linecache.getline(finding.file, finding.line)
    assert finding.under
    assert finding.do or finding.level == "refused"


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_model(name: str) -> None:
    job, strategy = SOUND[name]
    assert examined(job, strategy) == []


def test_a_broken_model_has_no_other_findings() -> None:
    """Where a model is broken in one way, nothing else is said about it."""
    for name in (
        *("plain list", "skipped by the optimizer", "skips layers", "own generator", "always drops", "changed weight"),
        *(
            "changed input",
            "changed labels",
            "number",
            "accumulation hook",
            "history",
            "float16",
            "other tokens",
            "device",
            "hardest half",
        ),
        *("unused", "frozen", "contrastive", "depth, torch", "guarded collective", "lazy"),
    ):
        job, kind, *_, strategy = BROKEN[name]
        found = examined(job, strategy)
        assert [one.kind for one in found] == [kind], name


def test_terms_say_where_something_matters() -> None:
    tied, norm = (examined(BROKEN[name][0], None)[0] for name in ("tied", "batch norm"))
    assert tied.under == ("pp", "layers")
    assert norm.under == ("pp", "mb")


def test_a_strategy_that_does_not_fit_its_ranks_is_refused() -> None:
    (found,) = examine_job(net, Strategy.parse("tp=2"), 3)
    assert found.level == "refused"
    assert "3 were given" in found.what


def test_findings_of_several_strategies_are_merged() -> None:
    one = Finding(kind="a", level="note", what="It is so.", module="m", file="f.py", line=3, under=("ddp",), do="Do.")
    (both,) = merged([one, Finding(**{**vars(one), "under": ("fsdp",)})])
    assert both.under == ("ddp", "fsdp")
    assert both.sentence(names=True) == "note: It is so. (f.py:3) [ddp, fsdp] Do."
    assert Finding.from_json(both.to_json()) == both


def test_a_builder_without_classes_is_the_place() -> None:
    from torch import nn

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 10))
        model[0].extra = nn.Parameter(model[0].weight.detach().clone())
        return model

    (found,) = examine_job(with_model(build))
    assert (found.kind, found.module) == ("unused-parameter", "0")
    assert "def build" in linecache.getline(found.file, found.line)


@pytest.mark.parametrize(
    ("extra", "arguments", "code", "kinds"),
    [
        ("", [], 0, []),
        ("", ["--strategy", "pp=2"], 0, []),
        ("", ["--strategy", "tp=3", "--ranks", "4"], 1, ["refused"]),
        (MEAN, [], 0, ["loss-weight"]),
        (LAZY, [], 1, ["lazy-parameter"]),
    ],
)
def test_the_command(extra: str, arguments: list[str], code: int, kinds: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB + extra)
    run = CliRunner().invoke(app, ["preflight", str(tmp_path / "job.py"), *arguments, "--json"])
    document = json.loads(run.stdout)
    assert [one["kind"] for one in document["findings"]] == kinds
    assert run.exit_code == code
    assert findings_page(document).renderables


def test_ranks_without_a_strategy_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    run = CliRunner().invoke(app, ["preflight", str(tmp_path / "job.py"), "--ranks", "2"])
    assert "--strategy" in str(run.exception)


def test_train_says_what_matters_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    job = BROKEN["unused"][0]
    told = tell_findings(job, describe(job), [Strategy.parse("ddp").resolve(2)])
    assert [one.kind for one in told] == ["unused-parameter"]
    assert capsys.readouterr().err.startswith("warning: The loss does not depend on extra.weight")
