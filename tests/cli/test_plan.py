"""`plan` and `validate` as a user calls them."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import BadInput, ClusterError, JobError, StrategyError

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
RUNNER = CliRunner()
HEADER = (
    "row,arch,n_layers,d_model,n_heads,d_ff,gated_mlp,vocab,seq_len,gpu,gpus_per_node,n_gpus,dp_replicate,dp_shard,"
    "zero_stage,tp,pp,micro_batch,grad_accum,status,tok_s_gpu,peak_mem_gib\n"
)
ROW = "a,llama,4,512,8,2048,True,8192,512,A100-40GB,8,8,8,1,0,1,1,8,1,ok,100000,4.0\n"
SPEED = ",100000,"


def test_json_has_what_the_design_names() -> None:
    document = json.loads(RUNNER.invoke(app, ["plan", GPT, "--on", "8xA100-40GB", "--fast", "--json"]).stdout)
    assert set(document) >= {"job", "cluster", "plans", "refused", "candidates", "seconds"}
    assert set(document["plans"][0]) >= {
        *("strategy", "fits", "peak_gib", "reserved_gib", "memory", "step_ms", "time", "samples_per_s"),
        *("tokens_per_s_per_device", "mfu", "error_bar", "why"),
    }
    assert set(document["refused"][0]) == {"strategy", "reason"}


def test_the_page_for_people_and_the_finalists_traced(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    found = RUNNER.invoke(app, ["plan", GPT, "--on", "2xH100-80GB", "--strategies", "ddp,bf16", "--html", str(page)])
    assert found.exit_code == 0, found.output
    assert "ddp=2,bf16" in found.stdout
    assert "traced" in found.stdout
    assert "ddp=2,bf16" in page.read_text()


def test_nothing_fits_is_exit_1() -> None:
    found = RUNNER.invoke(app, ["plan", "preset:llama3-8b:batch=8", "--on", "2xT4", "--precision", "fp16", "--fast"])
    assert found.exit_code == 1
    assert "Nothing fits" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["plan", GPT, "--on", "8xA100-40GB", "--ac", "some"], BadInput, "'some' is not one of none, selective, full"),
        (["plan", GPT, "--on", "8xA101"], ClusterError, "A101"),
        (["plan", "preset:llama3-9b", "--on", "8xA100-40GB"], JobError, "llama3-9b"),
        (["plan", GPT, "--on", "8xA100-40GB", "--strategies", "fdsp"], StrategyError, "fsdp"),
        (["validate", "no-such-file.csv"], BadInput, "no-such-file.csv"),
    ],
)
def test_bad_input_is_named(arguments: list[str], error: type[Exception], words: str) -> None:
    found = RUNNER.invoke(app, arguments)
    assert isinstance(found.exception, error)
    assert words in str(found.exception)


def test_validate_scores_rows_of_one_s_own(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(HEADER + ROW)
    document = json.loads(RUNNER.invoke(app, ["validate", str(rows), "--json"]).stdout)
    assert document["rows"] == document["memory"]["n"] == document["time"]["n"] == 1
    assert set(document["fit"]) == {"n", "recall", "false_alarm"}
    assert set(document["regret"]) == {"cells", "median", "p90"}


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(HEADER + ROW.replace(",512,8,", ",wide,8,"))
    found = RUNNER.invoke(app, ["validate", str(rows)])
    assert isinstance(found.exception, BadInput)
    assert "line 2" in str(found.exception)
    assert "d_model" in str(found.exception)


def test_validate_names_the_rows_that_it_leaves_out(tmp_path: Path) -> None:
    rows, table = tmp_path / "rows.csv", tmp_path / "forecasts.csv"
    strange = [ROW.replace("A100-40GB", "B9000"), ROW.replace(",512,8,", ",wide,8,"), ROW.replace(SPEED, ",0,")]
    rows.write_text(HEADER + ROW + "".join(strange) + ROW.replace(SPEED, ",,"))
    found = RUNNER.invoke(app, ["validate", str(rows), "--json", "--csv", str(table)])
    document = json.loads(found.stdout)
    assert document["rows"] == document["memory"]["n"] == 2
    assert document["time"]["n"] == 1
    reasons = " ".join(row["reason"] for row in document["skipped"])
    assert len(document["skipped"]) == 3
    assert all(word in reasons for word in ("B9000", "d_model", "tok_s_gpu"))
    (groups,) = document["groups"].values()
    assert sum(group["rows"] for group in groups.values()) == 2
    lines = list(csv.DictReader(table.read_text().splitlines()))
    assert len(lines) == 5
    assert float(lines[0]["forecast_peak_gib"]) > 0
    assert lines[0]["time_error"] and not lines[1]["time_error"]
    assert lines[-1]["reason"].startswith("skipped: ")
    assert "rows that are not scored: 3" in RUNNER.invoke(app, ["validate", str(rows)]).stdout


def test_validate_groups_rows_by_what_it_counts_and_names_a_missing_column(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(HEADER + ROW + ROW.replace(",8,8,8,1,0,1,1,", ",8,16,8,1,0,2,1,"))
    document = json.loads(RUNNER.invoke(app, ["validate", str(rows), "--json", "--by", "nodes"]).stdout)
    assert {nodes: group["rows"] for nodes, group in document["groups"]["nodes"].items()} == {"1": 1, "2": 1}
    document = json.loads(RUNNER.invoke(app, ["validate", str(rows), "--json", "--by", "axes"]).stdout)
    assert set(document["groups"]["axes"]) == {"data", "tp"}
    found = RUNNER.invoke(app, ["validate", str(rows), "--by", "colour"])
    assert isinstance(found.exception, BadInput) and "'colour'" in str(found.exception)


@pytest.mark.parametrize(
    ("column", "text", "word"),
    [
        ("pp_schedule", "2f2b", "pp_schedule"),
        ("activation_ckpt", "some", "activation_ckpt"),
        ("compute_dtype", "int4", "compute_dtype"),
        ("compute_dtype", "fp8", "fp8"),
        ("inter_node_link", "pigeons", "pigeons"),
    ],
)
def test_validate_leaves_out_a_row_with_a_word_it_does_not_know(
    tmp_path: Path, column: str, text: str, word: str
) -> None:
    rows = tmp_path / "rows.csv"
    pipelined = ROW.replace(",8,8,8,1,0,1,1,", ",8,16,8,1,0,1,2,").strip()
    rows.write_text(f"{HEADER.strip()},inter_node_gbps,{column}\n{ROW.strip()},,\n{pipelined},400,{text}\n")
    document = json.loads(RUNNER.invoke(app, ["validate", str(rows), "--json"]).stdout)
    assert document["rows"] == 1
    (skipped,) = document["skipped"]
    assert word in skipped["reason"]


def _columns(**changed: str) -> dict[str, str]:
    return {**dict(zip(HEADER.strip().split(","), ROW.strip().split(","), strict=True)), **changed}


def _validated(path: Path, *rows: dict[str, str], before: str = "", ends: str = "\n") -> Any:
    """The document of a table of these rows, with all their columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(row.get(name, "") for name in names) for row in rows)]
    path.write_bytes((before + ends.join(lines) + ends).encode())
    found = RUNNER.invoke(app, ["validate", str(path), "--json"])
    assert found.exit_code == 0, found.exception
    return json.loads(found.stdout)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"n_heads": "7"}, "heads"),
        ({"n_layers": "10000000"}, "n_layers"),
        ({"dp_shard": ""}, "dp_shard"),
        ({"n_layers": "nan"}, "n_layers"),
        ({"gpu_mem_gib": "lots"}, "gpu_mem_gib"),
        ({"compute_dtype": "float8"}, "compute_dtype"),
    ],
)
def test_no_row_ends_validate(tmp_path: Path, changed: dict[str, str], word: str) -> None:
    document = _validated(tmp_path / "rows.csv", _columns(), _columns(**changed))
    assert document["rows"] == 1
    (skipped,) = document["skipped"]
    assert skipped["row"] == "line 3" and word in skipped["reason"]


@pytest.mark.parametrize(
    "changed",
    [
        {"peak_mem_gib": "nan"},
        {"peak_mem_gib": " "},
        {"peak_mem_gib": "N/A"},
        {"compute_dtype": "BFloat16", "activation_ckpt": "None"},
        {"n_gpus": "16", "pp": "2", "pp_schedule": "AFAB", "inter_node_gbps": "400"},
        {"n_gpus": "16", "dp_replicate": "16", "inter_node_gbps": "", "source": "nanotron"},
        {"arch": "gpt-neox", "gated_mlp": "False", "a column of one's own": "3"},
        {"arch": "falcon", "n_kv_heads": "1", "source": "an engine that nobody knows"},
        {"arch": "Mistral", "n_kv_heads": "2", "gpu_mem_gib": ""},
    ],
)
def test_validate_reads_what_tables_hold(tmp_path: Path, changed: dict[str, str]) -> None:
    document = _validated(tmp_path / "rows.csv", _columns(**changed), before="\ufeff", ends="\r\n")
    assert (document["rows"], document["skipped"]) == (1, [])
    assert document["memory"]["n"] == ("peak_mem_gib" not in changed)


def test_validate_takes_a_device_from_columns(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    header = HEADER.strip() + ",gpu_mem_gib,gpu_mem_gbs,gpu_bf16_tflops,gpu_fp32_tflops\n"
    row = ROW.strip().replace("A100-40GB", "B9000")
    slow, fast = (row + f",40,{speed},{speed},{speed}\n" for speed in ("100", "1000"))
    rows.write_text(header + slow + fast)
    table = tmp_path / "forecasts.csv"
    RUNNER.invoke(app, ["validate", str(rows), "--json", "--csv", str(table)])
    times = [float(line["forecast_step_s"]) for line in csv.DictReader(table.read_text().splitlines())]
    assert times[0] > 1.5 * times[1]


def test_calibrated_to_one_s_own_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(HEADER + ROW)
    command = ["plan", GPT, "--on", "8xA100-40GB", "--fast", "--json", "--calibrate", str(rows)]
    assert "Fitted to 1 runs" in json.loads(RUNNER.invoke(app, command).stdout)["advice"][0]
