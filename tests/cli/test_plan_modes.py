"""`plan --largest` and `plan --sweep` as a user calls them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from meshwright.api.described_presets import JobDescription, describe_job
from meshwright.api.sweep_range import SweepRange
from meshwright.cli.main import app
from meshwright.errors import BadInput, JobError
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.planner.account import capacity, usable
from meshwright.units import GIB

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
RUNNER = CliRunner()
KNOWN = cache(describe_job)


@pytest.fixture(autouse=True)
def described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describing a model takes longer than all that is asked about it here."""
    for module in ("job_planner", "sweep"):
        monkeypatch.setattr(f"meshwright.api.{module}.describe_job", KNOWN)


def call(*words: str) -> Result:
    return RUNNER.invoke(app, ["plan", *words])


def document(*words: str) -> dict[str, Any]:
    found = call(*words, "--json")
    assert found.exit_code == 0, found.output
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def test_the_told_size_fits_and_the_next_does_not() -> None:
    found = document("preset:gpt2", "--on", "4xA100-40GB", "--largest", "--fast", "--strategies", "ddp,bf16", "tp=3")
    room = usable(hardware_of(Cluster.parse("4xA100-40GB"))) / GIB
    assert found["room_gib"] == room
    ddp, tp = found["results"]
    assert (ddp["strategy"], ddp["fits"], ddp["reason"]) == ("ddp=4,bf16", True, "")
    assert ddp["batch"] == 4 * ddp["limits"]["batch"]["samples"] >= 4 * ddp["micro_batch"]
    assert ddp["limits"]["micro_batch"]["strategy"] == f"ddp=4,bf16,mb={ddp['micro_batch']}"
    for limit in ddp["limits"].values():
        assert limit["reserved_gib"] <= room < limit["next"]["reserved_gib"]
        assert limit["next"]["samples"] == limit["samples"] + 1
        assert limit["step_ms"] > 0 and limit["grade"] == "account"
    assert (tp["fits"], tp["micro_batch"], tp["batch"]) == (False, None, None)
    assert "multiple of 3" in tp["reason"]


def test_the_border_is_that_of_traced_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace has the last word: here it needs 3 GiB for a sample and rank, and 10 for the rest."""

    def trace(job: Job, facts: object, strategy: Strategy, ranks: int, *, whole: bool, capacity: float) -> list[Trace]:
        assert whole and 38 * GIB < capacity < 39 * GIB
        samples = job.global_batch // ranks // (2 if strategy.micro_batch else 1)
        peak = (10 + 3 * samples) * GIB
        return [Trace(rank=0, ranks=ranks, memory={"activations": peak}, reserved=peak + 2 * GIB, returns=samples - 7)]

    monkeypatch.setattr("meshwright.tracing.trace_roles", trace, raising=False)
    words = ("preset:gpt2", "--on", "2xA100-40GB", "--largest", "--strategies", "ddp,bf16")
    (row,) = document(*words)["results"]
    assert (row["micro_batch"], row["batch"]) == (8, 16)
    limit = row["limits"]["batch"]
    assert (limit["grade"], limit["peak_gib"], limit["reserved_gib"]) == ("trace", 34, 36)
    assert limit["next"] == {"samples": 9, "peak_gib": 37, "reserved_gib": 39}
    assert limit["returns"] == 1
    shown = call(*words)
    assert "ddp=2,bf16: tracing 8 samples in a micro-batch" in shown.stderr
    assert "tracing" not in shown.stdout and "* traced on fake tensors" in shown.stdout
    assert "16+" in shown.stdout and "returns memory in every step" in shown.stdout


@pytest.mark.thorough
def test_a_real_trace_on_both_sides_of_the_border() -> None:
    (row,) = document("preset:gpt2", "--on", "1xT4", "--largest", "--strategies", "single,fp32")["results"]
    for limit in row["limits"].values():
        assert limit["grade"] == "trace"
        room = capacity(hardware_of(Cluster.parse("1xT4")), ranks=1) / GIB
        assert limit["reserved_gib"] <= room < limit["next"]["reserved_gib"]
        assert limit["next"]["samples"] == limit["samples"] + 1


def test_a_step_that_cannot_be_traced_keeps_the_account() -> None:
    (row,) = document("preset:gpt2", "--on", "2xA100-40GB", "--largest", "--strategies", "dp")["results"]
    assert row["fits"] and row["limits"]["batch"]["grade"] == "account"
    assert "could not be traced" in row["notes"][0] and len(row["notes"]) == 1


def test_a_pipeline_has_a_micro_batch_only() -> None:
    found = document(
        *("preset:gpt2", "--on", "4xA100-40GB", "--largest", "--fast"),
        *("--strategies", "pp=4:1f1b,bf16", "pp=4:gpipe,bf16", "layers=4"),
    )
    steady, whole, layers = found["results"]
    assert steady["micro_batch"] > whole["micro_batch"] >= 1
    assert steady["batch"] is None and whole["batch"] is None and steady["notes"] == []
    assert "keeps every micro-batch in flight" in whole["notes"][0]
    assert layers["batch"] >= layers["micro_batch"] >= 1


@pytest.mark.thorough
def test_batchnorm_does_not_accumulate() -> None:
    (found,) = document("preset:resnet-50", "--on", "2xT4", "--largest", "--fast", "--strategies", "ddp")["results"]
    assert found["batch"] == 2 * found["micro_batch"] > 0
    assert "BatchNorm" in found["notes"][0]


def test_a_strategy_that_holds_no_sample_is_a_row_with_the_reason(tmp_path: Path) -> None:
    small = tmp_path / "small.json"
    small.write_text('{"devices_per_node": 2, "device": "T4", "memory_gib": 2.5}')
    words = ("preset:gpt2", "--on", str(small), "--largest", "--fast", "--strategies", "ddp,fp16")
    found = call(*words, "--json")
    assert found.exit_code == 1
    (row,) = json.loads(found.stdout)["results"]
    assert row["reason"].startswith("A micro-batch of one sample needs")
    assert "A micro-batch of one sample needs" in " ".join(call(*words).stdout.split())


def test_without_names_the_plans_of_the_ranking_are_asked() -> None:
    found = document("preset:gpt2:batch=64", "--on", "4xA100-40GB", "--largest", "--fast", "--top", "3")
    assert 1 <= len(found["results"]) <= 3
    assert all(row["fits"] and "mb=" not in row["strategy"] for row in found["results"])


def test_a_sweep_over_devices() -> None:
    found = document("preset:gpt2:batch=64", "--on", "4xA100-40GB", "--sweep", "devices=2..16", "--no-pipeline")
    assert (found["quantity"], found["unit"]) == ("devices", "devices")
    assert [point["value"] for point in found["points"]] == [2, 4, 8, 16]
    assert [point["cluster"] for point in found["points"]] == [
        *("2xA100-40GB", "4xA100-40GB", "2x4xA100-40GB", "4x4xA100-40GB")
    ]
    for point in found["points"]:
        assert point["best"] in [plan["strategy"] for plan in point["kinds"]]
        steps = [plan["step_ms"] for plan in point["kinds"]]
        assert steps == sorted(steps)
        first = point["kinds"][0]
        assert first["tokens_per_s"] == pytest.approx(first["tokens_per_s_per_device"] * point["devices"])
        assert first["samples_per_s"] == pytest.approx(first["samples_per_s_per_device"] * point["devices"])
        assert all(plan["grade"] == "account" and plan["fits"] for plan in point["kinds"])


def test_named_strategies_are_lines_of_their_own(tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    words = ("--strategies", "fsdp,bf16", "hsdp=2x4,bf16", "--html", str(page))
    found = call("preset:gpt2", "--on", "2x4xA100-40GB", "--batch", "64", "--sweep", "link=1,25,100.5", *words)
    assert found.exit_code == 0, found.output
    assert "hsdp=2x4" in found.stdout and "(GB/s)" in found.stdout
    assert "100.5 GB/s" in page.read_text()
    again = document(
        "preset:gpt2", "--on", "2x4xA100-40GB", "--sweep", "batch=8,64", "--strategies", "tp=3", "ddp,bf16"
    )
    assert [[plan["kind"] for plan in point["kinds"]] for point in again["points"]] == [["ddp,bf16"]] * 2
    assert [point["refused"][0]["strategy"] for point in again["points"]] == ["tp=3"] * 2
    assert [point["global_batch"] for point in again["points"]] == [8, 64]


def test_a_sweep_over_sequences_describes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    known = KNOWN("preset:gpt2")

    def describe(text: str) -> JobDescription:
        asked.append(text)
        return known

    monkeypatch.setattr("meshwright.api.sweep.describe_job", describe)
    words = ("--batch", "16", "--sweep", "sequence=256..1024", "--strategies", "ddp,bf16")
    document("preset:gpt2:batch=16", "--on", "2xA100-40GB", *words)
    assert asked == [f"preset:gpt2:seq={tokens},batch=16" for tokens in (256, 512, 1024)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("devices=8..64", (8, 16, 32, 64)),
        ("devices=8..100", (8, 16, 32, 64, 100)),
        ("batch=3..400", (3, 6, 12, 24, 48, 96, 192, 400)),
        ("batch=5..5", (5,)),
        ("batch=64,8,64", (8, 64)),
        ("link=12.5..50", (12.5, 25, 50)),
    ],
)
def test_ranges_double_and_end_at_their_end(text: str, values: tuple[float, ...]) -> None:
    assert SweepRange.parse(text).values == values


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("--sweep", "device=8..16"), BadInput, "did you mean 'devices'"),
        (("--sweep", "devices"), BadInput, "names no values"),
        (("--sweep", "devices=16..8"), BadInput, "write devices=8..16"),
        (("--sweep", "devices=8,x"), BadInput, "'x' is not a number above 0"),
        (("--sweep", "devices=0..8"), BadInput, "'0' is not a number above 0"),
        (("--sweep", "batch=1.5"), BadInput, "not a whole number of samples"),
        (("--sweep", "devices=6..20"), BadInput, "12 devices do not fill nodes of 8; use a multiple, such as 8"),
        (("--sweep", ",".join(["link=1", *map(str, range(2, 90))])), BadInput, "at most 64"),
        (("--sweep", "link=10..40"), BadInput, "needs several nodes"),
        (("--sweep", "sequence=128..256"), BadInput, "takes seq="),
        (("--sweep", "batch=8..16", "--batch", "4"), BadInput, "leave one of them out"),
        (("--sweep", "batch=8..16", "--timeline", "t.html"), BadInput, "--sweep cannot be combined with --timeline"),
        (("--sweep", "devices=8", "--largest"), BadInput, "--largest cannot be combined with --sweep"),
        (("--largest", "--html", "x.html"), BadInput, "--largest cannot be combined with --html"),
        (("--largest", "--batch", "8"), BadInput, "--largest cannot be combined with --batch"),
        (("--largest", "--strategies", "ddp,mb=4"), BadInput, "write ddp."),
    ],
)
def test_wrong_input_is_named_before_the_job_is_described(
    words: tuple[str, ...], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(*args: object) -> None:
        raise AssertionError("the job was described")

    monkeypatch.setattr("meshwright.api.sweep.describe_job", described)
    monkeypatch.setattr("meshwright.api.job_planner.describe_job", described)
    found = call(GPT, "--on", "8xA100-40GB", *words)
    assert isinstance(found.exception, error), found.output
    assert said in str(found.exception)


def test_more_tokens_than_a_model_has_positions() -> None:
    found = call("preset:gpt2", "--on", "8xA100-40GB", "--sweep", "sequence=512..2048")
    assert isinstance(found.exception, JobError)
    assert "1024 positions, but seq=2048" in str(found.exception)
