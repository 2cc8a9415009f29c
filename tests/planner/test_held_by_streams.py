"""Gathered inputs that wait for streams, in forecasts of other engines' runs."""

from pathlib import Path

import pytest

from meshwright.api.validate import validate_rows
from meshwright.planner.scores import ScoredRun
from meshwright.units import GIB

HEADER = (
    "row,arch,n_layers,d_model,n_heads,d_ff,gated_mlp,vocab,seq_len,gpu,gpus_per_node,n_gpus,inter_node_gbps,"
    "dp_replicate,dp_shard,zero_stage,tp,sequence_parallel,pp,pp_schedule,micro_batch,grad_accum,status,param_dtype\n"
)
STREAM = 8 * 4096 * 2048 * 2 / GIB
"""Of the rows below: samples, tokens, width and bytes of an activation between blocks."""


def _row(layers: int, *, micro_batches: int, tensor: int = 4, stages: int = 1) -> str:
    shape = f"llama,{layers},2048,32,8192,True,32768,4096,H100-80GB,8,{tensor * stages},3200"
    return f"a,{shape},1,1,0,{tensor},True,{stages},1f1b,8,{micro_batches},ok,bf16\n"


def _forecast(path: Path, *rows: str) -> list[ScoredRun]:
    table = path / "rows.csv"
    table.write_text(HEADER + "".join(rows))
    return validate_rows(table)


def _activations(run: ScoredRun) -> float:
    assert run.account is not None
    return run.account.ranks[0].memory["activations"] / GIB


@pytest.mark.parametrize("layers", [4, 8])
def test_a_host_is_ahead_by_as_much_in_deep_models(tmp_path: Path, layers: int) -> None:
    """A step of one micro-batch holds a share of its own inputs, two of each block; others what a device queues."""
    rows = (_row(layers, micro_batches=1), _row(layers, micro_batches=8))
    one, many = map(_activations, _forecast(tmp_path, *rows))
    assert many - one == pytest.approx((50 - 0.75 * 2 * layers * (1 - 1 / 4)) * STREAM, rel=0.02)


def test_a_long_pipeline_queues_no_more(tmp_path: Path) -> None:
    single, staged = _forecast(tmp_path, _row(8, micro_batches=16), _row(8, micro_batches=16, tensor=2, stages=2))
    assert single.account is not None and staged.account is not None
    assert single.account.timing.waiting == staged.account.timing.waiting == 0
    assert all(_activations(run) > 48 * STREAM for run in (single, staged))
