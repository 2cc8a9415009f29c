"""Pipelines of other engines on EFA: tied gradients summed whole."""

from pathlib import Path

import pytest

from meshwright.api.validate import validate_rows
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.planner.collectives import RankGroup, seconds

VOCABULARY, WIDTH = 32768, 1024
HEADER = (
    "source,arch,n_layers,d_model,n_heads,d_ff,gated_mlp,vocab,tied_embeddings,seq_len,gpu,gpus_per_node,n_gpus,"
    "inter_node_gbps,dp_replicate,dp_shard,zero_stage,tp,pp,pp_schedule,micro_batch,grad_accum,status,param_dtype\n"
)


def _row(*, nodes: int, zero_stage: int = 1, micro_batches: int = 8, tied: bool = False, stages: int = 2) -> str:
    data = nodes * 8 // stages
    replicas, shards = (data, 1) if zero_stage == 0 else (1, data)
    shape = f"nanotron,llama,8,{WIDTH},16,2048,True,{VOCABULARY},{tied},1024,H100-80GB,8,{nodes * 8},3200"
    return f"{shape},{replicas},{shards},{zero_stage},1,{stages},1f1b,1,{micro_batches},ok,bf16\n"


def _between_stages(path: Path, *rows: str) -> list[float]:
    """Seconds that each run spends on what stages send."""
    table = path / "rows.csv"
    table.write_text(HEADER + "".join(rows))
    accounts = [run.account for run in validate_rows(table)]
    return [account.timing.parts["stages"] for account in accounts if account is not None]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_tied_gradients_are_summed_whole(tmp_path: Path, zero_stage: int) -> None:
    """Accumulators keep their size under ZeRO 1. All stages' pairs send at once, over the network of the whole job."""
    rows = [_row(nodes=4, zero_stage=zero_stage, tied=tied) for tied in (True, False)]
    tied, untied = _between_stages(tmp_path, *rows)
    hardware = hardware_of(Cluster.parse("4x8xH100-80GB@3200Gbps:efa"))
    whole = seconds("all_reduce", 4.0 * VOCABULARY * WIDTH, RankGroup(2, 1, 2, 8, 4), hardware)
    assert tied - untied == pytest.approx(whole)
