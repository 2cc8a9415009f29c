"""The context axis without ranks: its text, what it refuses, what the planner hears of it."""

from collections import Counter
from dataclasses import replace
from functools import cache
from io import StringIO

import pytest
from rich.console import Console

import tiny_jobs
from meshwright.assemble.axes import mesh_sizes
from meshwright.assemble.check import check
from meshwright.commands.layout import show_layout
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.exchange import export
from meshwright.exchange.export_request import ExportRequest
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.candidates import Allowed, candidates
from meshwright.planner.step_layout import lay_out_step
from meshwright.report.layout import layout_page
from meshwright.runtime.place import place_for
from meshwright.strategies.context.axis import ContextParallel
from meshwright.strategies.context.division import ContextDivision
from meshwright.tracing.costs import measure_costs
from meshwright.tracing.step import trace_step

SHAPE = Shape(layers=2, width=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=128, length=32)
JOB = decoder_job(SHAPE, global_batch=4)


@cache
def described() -> ModelFacts:
    return describe(JOB)


def refusal(text: str, ranks: int, job: Job = JOB, facts: ModelFacts | None = None) -> str:
    with pytest.raises(Refused) as found:
        check(job, facts or described(), Strategy.parse(text), place_for("cpu", ranks))
    return str(found.value)


def test_its_text_and_its_ranks() -> None:
    assert str(Strategy.parse("bf16,cp=4,fsdp=2")) == "fsdp=2,cp=4,bf16"
    resolved = Strategy.parse("cp=4,tp=2,hsdp=2x2").resolve(32)
    assert (resolved.data_ranks, resolved.reduced_ranks, resolved.state_shards) == (4, 16, 8)
    assert mesh_sizes(resolved) == {"data": 4, "context": 4, "tensor": 2}


def test_gradients_are_summed_although_no_data_axis_is_named() -> None:
    resolved = Strategy.parse("cp=4").resolve(4)
    assert resolved.data == "ddp" and resolved.data_ranks == 1 and resolved.reduced_ranks == 4


def test_tokens_are_a_fact_of_the_model() -> None:
    assert described().tokens == (32,)
    assert ModelFacts.from_json(described().to_json()) == described()


def test_what_does_not_divide_is_refused_by_name() -> None:
    facts = replace(described(), tokens=(30,))
    assert "blocks.0 returns 30 of them; pad samples to a multiple of 4 tokens" in refusal("cp=4", 4, facts=facts)
    assert "no block of this model returns (batch, tokens, width)" in refusal(
        "cp=2", 2, facts=replace(facts, tokens=())
    )
    assert "cannot be combined with op=2" in refusal("cp=2,op=2", 4)


def test_its_layout() -> None:
    document = show_layout(JOB, described(), Strategy.parse("fsdp,cp=4"), 8)
    assert document["tokens"] == {"all": [32], "ranks": 4, "chunks": 2}
    console = Console(width=200, record=True, file=StringIO())
    console.print(layout_page(document))
    assert "a rank has 8 of 32 tokens of a sample, from both ends" in console.export_text()


def test_two_chunks_a_rank_where_they_divide() -> None:
    axis = ContextParallel()
    assert axis.plan(None, described(), 4)
    assert not axis.plan(None, replace(described(), tokens=(12,)), 4)


def test_it_is_searched_for_long_samples_only() -> None:
    cluster = Cluster.parse("8xH100-80GB")
    assert not ContextParallel().sizes(described(), cluster)
    long = replace(described(), tokens=(65536,))
    assert list(ContextParallel().sizes(long, cluster)) == [2, 4, 8]
    found = {str(one) for one in candidates(long, cluster, 1, Allowed(recompute=("full",), offload=("",)))}
    assert "fsdp,cp=8,bf16,ac=full,mb=1" in found


def test_no_larger_micro_batch_than_is_useful_is_searched() -> None:
    long = replace(described(), tokens=(65536,))
    found = list(candidates(long, Cluster.parse("8xH100-80GB"), 64, Allowed(recompute=("full",), offload=("",))))
    texts = ("ddp,bf16", "fsdp,cp=8")
    sizes = {text: {one.micro_batch for one in found if str(one).startswith(text)} for text in texts}
    assert sizes == {"ddp,bf16": {1, 2}, "fsdp,cp=8": {1, 2, 4, 8, 16}}


def test_states_are_sharded_over_it() -> None:
    layout = lay_out_step(Strategy.parse("fsdp,cp=4").resolve(8), described(), 4)
    assert (layout.data, layout.reduced, layout.shards, layout.parameters_over) == (2, 8, 8, 8)


@pytest.mark.parametrize("text", ["cp=2,bf16", "cp=4,bf16", "cp=2,bf16,ac=full", "cp=2,bf16,ac=selective"])
def test_messages_of_a_trace_are_those_that_were_priced(text: str) -> None:
    strategy = Strategy.parse(text)
    traced: Counter[tuple[str, int]] = Counter()
    for message in trace_step(JOB, described(), strategy, ranks=strategy.model_ranks).messages:
        if message.kind != "all_reduce":  # the loss, its weight and parameters' gradients
            traced[message.kind, round(message.bytes)] += message.count
    division, counted = ContextDivision(strategy.model_ranks), Counter[tuple[str, int]]()
    for unit in measure_costs(JOB, described(), "bf16").recomputed(strategy.recompute).units:
        share = division.share(unit, JOB.global_batch, 0.0)
        for each in (*share.forward, *share.backward):
            if each.kind != "all_reduce":
                counted[each.kind, round(each.bytes)] += each.times
    assert traced == counted and counted


def test_a_rank_keeps_and_computes_its_share() -> None:
    unit = next(unit for unit in measure_costs(JOB, described(), "bf16").units if unit.is_block)
    share = ContextDivision(4).share(unit, 2, 0.0)
    keys_and_values = 2 * (2 * 2 * 32 * 16) * 2  # of 2 samples, 2 heads, 32 tokens, 16 wide, in bf16
    assert share.parts == 4
    assert share.regathered == pytest.approx(keys_and_values * 3 / 4)


def test_other_frameworks_names() -> None:
    for shards in (1, 2):
        strategy, ranks = Strategy.parse(f"fsdp={shards},cp=4"), 4 * shards
        request = ExportRequest(strategy=strategy, ranks=ranks, job="job.py", global_batch=8)
        titan, accelerate = (export(request, name).text for name in ("torchtitan", "accelerate"))
        assert "context_parallel_degree = 4" in titan and f"data_parallel_shard_degree = {shards}" in titan
        assert "parallelism_config_cp_size: 4" in accelerate and "distributed_type: FSDP" in accelerate


def test_a_loop_of_the_user_s_own_is_refused() -> None:
    from meshwright import parallelize

    with pytest.raises(Refused, match="cp divides samples over ranks, whose gradients must be summed"):
        parallelize(tiny_jobs.transformer.model(), "cp=2", sample=tiny_jobs.transformer.sample(2))
