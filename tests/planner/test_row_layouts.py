"""What a row of a published table says about its engine: stages, shards, gradients, and what is compiled."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.api.validate import validate_rows, validate_table
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.planner.account import account
from meshwright.planner.measured_runs import read_rows
from meshwright.planner.step_layout import StepLayout

USUAL = {
    **{"arch": "llama", "n_layers": "16", "d_model": "256", "n_heads": "8", "d_ff": "512", "gated_mlp": "True"},
    **{"vocab": "1000", "seq_len": "128", "gpu": "H100-80GB", "gpus_per_node": "8", "dp_replicate": "1"},
    **{"dp_shard": "2", "zero_stage": "3", "tp": "1", "pp": "1", "micro_batch": "1", "grad_accum": "8"},
    **{"n_gpus": "8", "status": "ok", "inter_node_gbps": "3200", "param_dtype": "fp32", "grad_dtype": "fp32"},
}


def _table(folder: Path, *changes: dict[str, str]) -> Path:
    path = folder / "rows.csv"
    rows = [{**USUAL, **changed} for changed in changes]
    names = list(dict.fromkeys(name for row in rows for name in row))
    path.write_text("\n".join([",".join(names), *(",".join(row.get(name, "") for name in names) for row in rows)]))
    return path


def _layout(folder: Path, **changed: str) -> StepLayout:
    (row,) = read_rows(_table(folder, changed))
    return row.step_layout


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "dualpipev"])
def test_schedules_of_several_stages_a_rank_are_forecast(tmp_path: Path, schedule: str) -> None:
    layout = _layout(tmp_path, pp="4", pp_schedule=schedule)
    assert layout.virtual == 2 and layout.stages == 8
    several, one = validate_rows(_table(tmp_path, *({"pp": "4", "pp_schedule": name} for name in (schedule, "gpipe"))))
    assert several.account is not None and one.account is not None
    assert several.account.timing.parts["bubble"] < one.account.timing.parts["bubble"]


def test_a_schedule_without_a_pipeline_means_nothing(tmp_path: Path) -> None:
    """Tables name their engine's default schedule in every row."""
    layout = _layout(tmp_path, pp_schedule="interleaved")
    assert layout == _layout(tmp_path) and layout.stages == 1


def test_stages_under_fsdp_stay_gathered_and_hold_whole_gradients(tmp_path: Path) -> None:
    staged, plain = _layout(tmp_path, pp="4"), _layout(tmp_path)
    assert (staged.reshards, staged.gradients_over) == (False, 1)
    assert (plain.reshards, plain.gradients_over) == (True, 2)
    assert _layout(tmp_path, pp="4", grad_accum="1").gradients_over == 2


@pytest.mark.parametrize(("stage", "states"), [("0", 1), ("1", 8), ("3", 8)])
def test_ranks_that_share_a_sequence_shard_states(tmp_path: Path, stage: str, states: int) -> None:
    layout = _layout(tmp_path, cp="4", zero_stage=stage)
    assert (layout.data, layout.optimizer_over, layout.ranks) == (2, states, 8)


def test_other_engines_do_not_compile_the_loss(tmp_path: Path) -> None:
    """So logits in fp32 and their gradient are written, and the larger vocabulary shows in the peak."""
    wide = {"compile": "True", "vocab": "128000", "seq_len": "2048", "zero_stage": "3", "grad_accum": "1"}
    (run,) = validate_rows(_table(tmp_path, wide))
    assert run.account is not None
    logits = 2048 * 128000 * 4
    assert run.account.forecast.memory["logits"] > 2 * logits


def test_a_lower_limit_of_power_takes_a_part_of_the_clock() -> None:
    slow, usual = (hardware_of(Cluster.parse(f"8x{name}")) for name in ("H100-96GB", "H100-80GB"))
    assert slow.flops == usual.flops and 0.8 < slow.reach["clock"] < 0.9


def test_a_row_that_fails_is_named_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(layout: StepLayout, *rest: Any) -> Any:
        if layout.micro_batch == 3:
            raise KeyError("a mistake of ours")
        return account(layout, *rest)

    monkeypatch.setattr("meshwright.api.validate.account", failing)
    table = _table(tmp_path, {}, {"micro_batch": "3"}, {})
    found = validate_table(table)
    assert len(found.outcomes) == 2
    assert [(row.name, row.reason) for row in found.skipped] == [("line 3", "KeyError: 'a mistake of ours'")]
    with pytest.raises(KeyError):
        validate_rows(table)
