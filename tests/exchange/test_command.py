"""`export` and `plan --against` as a user calls them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import BadInput, MeshwrightError, StrategyError
from meshwright.exchange import ExchangeError

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
RUNNER = CliRunner()
PLAN = {
    "job": GPT,
    "cluster": "2x4xA100-40GB",
    "plans": [{"strategy": "hsdp=2x4,bf16,mb=1"}, {"strategy": "ddp=8,bf16,mb=2"}],
}


def call(*arguments: str | Path) -> Result:
    return RUNNER.invoke(app, [str(word) for word in arguments])


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    return path


def test_a_strategy_goes_to_stdout_and_losses_to_stderr() -> None:
    found = call("export", "zero2=8,bf16", "--to", "accelerate")
    assert found.exit_code == 0
    assert yaml.safe_load(found.stdout)["deepspeed_config"]["zero_stage"] == 2
    assert "not expressible: zero2=8:" in found.stderr


def test_a_plan_brings_its_cluster_and_its_job(plan: Path) -> None:
    document = json.loads(call("export", plan, "--to", "deepspeed", "--json", "--pick", "2").stdout)
    config = json.loads(document["text"])
    assert document["strategy"] == "ddp=8,bf16,mb=2"
    assert (document["ranks"], document["nodes"], document["file"]) == (8, 2, None)
    assert config["train_batch_size"] == 16  # the job's own
    assert config["gradient_clipping"] == 1.0
    assert document["without_equal"] == []


def test_a_plan_is_picked_by_its_text(plan: Path) -> None:
    document = json.loads(call("export", plan, "--to", "torchtitan", "--json", "--pick", "ddp=8,bf16,mb=2").stdout)
    assert document["becomes"] == "ddp=8,bf16,mb=2"


def test_a_file_is_written(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "train.sbatch"
    found = call("export", plan, "--to", "slurm", "--out", out)
    assert found.exit_code == 0, found.output
    assert "#SBATCH --nodes=2\n" in out.read_text()
    assert "--strategy hsdp=2x4,bf16,mb=1" in out.read_text()
    assert GPT in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["fsdp", "--to", "deepspeed"], BadInput, "--on or --ranks"),
        (["ddp,tp=2", "--to", "accelerate"], BadInput, "--on or --ranks"),
        (["fsdp", "--to", "deepspeed", "--ranks", "8", "--on", "8xA100-40GB"], BadInput, "one of them"),
        (["fdsp", "--to", "deepspeed", "--ranks", "8"], StrategyError, "fsdp"),
        (["fsdp", "--to", "colossalai", "--ranks", "8"], ExchangeError, "accelerate, deepspeed"),
        (["no.json", "--to", "deepspeed"], BadInput, "no.json"),
        (["fsdp=8", "--to", "deepspeed", "--pick", "2"], BadInput, "--pick"),
        (["tp=3", "--to", "accelerate", "--ranks", "8"], MeshwrightError, "multiple of 3"),
        (["fsdp=8", "--to", "slurm"], ExchangeError, "--job"),
    ],
)
def test_bad_input_is_named(arguments: list[str], error: type[Exception], words: str) -> None:
    found = call("export", *arguments)
    assert isinstance(found.exception, error)
    assert getattr(found.exception, "exit_code", 1) == 2
    assert words in str(found.exception)


@pytest.mark.parametrize("pick", ["3", "0", "fsdp"])
def test_a_plan_that_is_not_there(pick: str, plan: Path) -> None:
    found = call("export", plan, "--to", "slurm", "--pick", pick)
    assert isinstance(found.exception, BadInput)
    assert "from 1 to 2" in str(found.exception)


def against(tmp_path: Path, text: str, *options: str) -> dict[str, object]:
    path = tmp_path / "theirs"
    path.write_text(text)
    found = call("plan", GPT, "--on", "8xA100-40GB", "--fast", "--json", "--against", path, *options)
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    result: dict[str, object] = document["against"]
    assert result["file"] == str(path)
    return {**result, "first": document["plans"][0]["strategy"], "listed": len(document["plans"])}


ACCELERATE = "distributed_type: {kind}\nmixed_precision: {precision}\nnum_processes: {ranks}\n"


def test_a_choice_falls_into_its_place(tmp_path: Path) -> None:
    recomputing = "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n"
    found = against(tmp_path, ACCELERATE.format(kind="FSDP", precision="bf16", ranks=8) + recomputing)
    assert re.fullmatch(r"fsdp=8,bf16,ac=full,mb=[12],reduce=bf16", str(found["strategy"]))
    assert isinstance(found["rank"], int)
    assert found["rank"] > 1
    assert found["reason"] == ""
    assert re.match(r"The first plan takes \d+% less time", str(found["gain"]))
    assert any("micro-batch" in str(note) for note in found["notes"])  # type: ignore[attr-defined]


def test_the_first_plan_may_be_theirs(tmp_path: Path) -> None:
    ours = against(tmp_path, ACCELERATE.format(kind="MULTI_GPU", precision="bf16", ranks=8))["first"]
    exported = call("export", str(ours), "--to", "torchtitan", "--on", "8xA100-40GB").stdout
    found = against(tmp_path, exported)
    assert (found["strategy"], found["rank"]) == (ours, 1)
    assert "nothing to gain" in str(found["gain"])


def test_a_choice_for_other_machines_is_refused_with_its_reason(tmp_path: Path) -> None:
    found = against(tmp_path, ACCELERATE.format(kind="MULTI_GPU", precision="bf16", ranks=6))
    assert (found["rank"], found["plan"], found["fits"]) == (None, None, False)
    assert "needs 6 ranks" in str(found["reason"])
    assert "the first plan" in str(found["gain"])


def test_deepspeed_s_engine_need_not_be_installed(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
    found = against(tmp_path, text)
    assert found["strategy"] == "zero2=8,bf16,mb=1,reduce=bf16,engine=deepspeed"
    assert isinstance(found["rank"], int)


def test_a_choice_that_does_not_fit_is_told(tmp_path: Path) -> None:
    """In the table, in the explanation and on the page."""
    path, page = tmp_path / "theirs.yaml", tmp_path / "plan.html"
    path.write_text(ACCELERATE.format(kind="MULTI_GPU", precision="bf16", ranks=8))
    job = "preset:llama3-8b:batch=8,seq=512"
    found = call("plan", job, "--on", "8xA100-40GB", "--fast", "--against", path, "--html", page)
    told = " ".join(found.stdout.split())
    assert "ddp=8,bf16,mb=1: needs" in told
    assert "Your strategy does not fit; the first plan" in told
    assert "Your strategy does not fit; the first plan" in page.read_text()


def test_a_choice_is_marked_in_the_table(tmp_path: Path) -> None:
    path, page = tmp_path / "theirs.yaml", tmp_path / "plan.html"
    path.write_text(ACCELERATE.format(kind="MULTI_GPU", precision="'no'", ranks=8))
    arguments = [
        "plan",
        GPT,
        "--on",
        "8xA100-40GB",
        "--fast",
        "--against",
        str(path),
        "--html",
        str(page),
        "--top",
        "2",
    ]
    found = RUNNER.invoke(app, arguments, env={"COLUMNS": "200"})
    number = re.search(r"ddp=8,mb=\d [^\n]*\n[^\n]*<- yours, number (\d+)", found.stdout)  # below the strategy
    assert number is not None, found.stdout
    assert f"<mark>yours, number {number[1]}</mark>" in page.read_text()


def test_a_config_that_cannot_be_read_is_exit_2(tmp_path: Path) -> None:
    found = call("plan", GPT, "--on", "8xA100-40GB", "--against", tmp_path / "gone.yaml")
    assert isinstance(found.exception, ExchangeError)
    assert found.exception.exit_code == 2
