"""What cannot be is refused before any process starts, and the message says what to do instead."""

from dataclasses import replace

import pytest

import pipeline_jobs
from meshwright.assemble.check import check, check_strategy
from meshwright.assemble.dry_run import dry_run
from meshwright.describe.model import describe
from meshwright.errors import NotBuiltYet, Refused
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts, ParameterFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import DATA_STRATEGIES, Place
from minimal import WIDTH, make_job

WEIGHT = ParameterFacts(names=("layer.weight",), shape=(WIDTH, WIDTH), itemsize=4)
SCALE = ParameterFacts(names=("scale",), shape=(), itemsize=4)
FACTS = ModelFacts(parameters=(WEIGHT,), blocks=("layer",), weight_per_sample=1.0)
BATCH_NORM = replace(FACTS, batch_norms=("norm",))
JOB = make_job(global_batch=8)


def place(device: str = "cpu", *, ranks: int, devices: int = 8, local_ranks: int | None = None) -> Place:
    return Place(device=device, devices=devices, ranks=ranks, local_ranks=ranks if local_ranks is None else local_ranks)


def refusal(text: str, where: Place, facts: ModelFacts = FACTS, batch: int = 8) -> str:
    with pytest.raises(Refused) as caught:
        check(make_job(global_batch=batch), facts, Strategy.parse(text), where)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "ranks", "resolved"),
    [
        ("single", 1, "single"),
        ("fp32", 2, "ddp=2"),
        ("fsdp,bf16,ac=full,mb=2,compile", 4, "fsdp=4,bf16,ac=full,mb=2,compile"),
        ("hsdp=2x2,offload=params", 4, "hsdp=2x2,offload=params"),
        ("zero1,fp16,offload=optimizer", 2, "zero1=2,fp16,offload=optimizer"),
        ("ddp", 8, "ddp=8"),
    ],
)
def test_what_can_be_is_sized(text: str, ranks: int, resolved: str) -> None:
    assert str(check(JOB, FACTS, Strategy.parse(text), place(ranks=ranks))) == resolved


@pytest.mark.parametrize("term", ["auto", "offload=nvme:/scratch"])
def test_a_term_without_an_engine_is_named(term: str) -> None:
    with pytest.raises(NotBuiltYet) as caught:
        check(JOB, FACTS, Strategy.parse(term), place(ranks=2))
    assert str(caught.value).startswith(f"{term} is a strategy term")
    for word in DATA_STRATEGIES:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ranks", "resolved"),
    [
        ("pp=2:1f1b", 2, "pp=2:1f1b"),
        ("pp=2:interleaved,fsdp", 4, "fsdp=2,pp=2:interleaved"),
        ("pp=4:gpipe", 4, "pp=4:gpipe"),
        ("layers=2", 4, "ddp=2,layers=2"),
        ("op=2,hsdp=1x2", 4, "hsdp=1x2,op=2"),
        ("op=2,pp=2:zb", 4, "op=2,pp=2:zb"),
        ("tp=2,ac=full", 2, "tp=2,ac=full"),
        ("pp=2:zb,compile", 2, "pp=2:zb,compile"),
        ("layers=2,fsdp,compile", 4, "fsdp=2,layers=2,compile"),
    ],
)
def test_the_models_axes_are_sized(text: str, ranks: int, resolved: str) -> None:
    job = pipeline_jobs.trunk
    assert str(check(job, describe(job), Strategy.parse(text), place(ranks=ranks))) == resolved


@pytest.mark.parametrize(
    ("text", "ranks", "says"),
    [
        ("pp=5:gpipe", 5, "cut into 5 stages, because it has 4 blocks"),
        ("pp=4:interleaved", 4, "cannot be cut into 8 stages"),
        ("layers=8", 8, "use at most 4 stages"),
        ("pp=4:1f1b,mb=4", 4, "mb=4 cuts a data rank's 8 samples into 2 micro-batches"),
        ("tp=2,compile,ac=selective", 2, "use ac=full"),
        ("pp=2:1f1b,fsdp,offload=params", 4, "offload=params is not built for a pipeline"),
        ("pp=2:1f1b,ddp,offload=params", 4, "needs fsdp or hsdp"),
        ("op=3", 3, "op=3 divides linear, convolution"),
        ("pp=4:1f1b", 6, "needs a multiple of 4 ranks, but 6 were given"),
    ],
)
def test_the_models_axes_are_refused(text: str, ranks: int, says: str) -> None:
    job = pipeline_jobs.trunk
    with pytest.raises(Refused) as caught:
        check(job, describe(job), Strategy.parse(text), place(ranks=ranks))
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_batch_smaller_than_the_micro_batches() -> None:
    job = replace(pipeline_jobs.trunk, global_batch=3)
    with pytest.raises(Refused, match="use a global batch of 4 or more, or pp:gpipe"):
        check(job, describe(job), Strategy.parse("pp=4:1f1b"), place(ranks=4))


def test_batch_norm_under_a_pipeline() -> None:
    job = pipeline_jobs.with_batch_norms
    facts = describe(job)
    with pytest.raises(Refused, match=r"BatchNorm \(blocks\.0\.norm\).*layers=2"):
        check(job, facts, Strategy.parse("pp=2:1f1b"), place(ranks=2))
    for text, ranks in [("layers=2", 2), ("layers=2,ddp", 4)]:
        assert check(job, facts, Strategy.parse(text), place(ranks=ranks))


def test_a_hint_of_stages() -> None:
    job = pipeline_jobs.trunk
    facts = describe(job)
    assert check(replace(job, stages=["blocks.1"]), facts, Strategy.parse("pp=2:1f1b"), place(ranks=2))
    for stages in (["nowhere"], ["blocks.1", "blocks.2"]):
        with pytest.raises(Refused, match=r"Job\(stages=\.\.\.\)"):
            check(replace(job, stages=stages), facts, Strategy.parse("pp=2:1f1b"), place(ranks=2))


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (pipeline_jobs.selecting, "shape depends on values before it calls its first module"),
        (pipeline_jobs.averaging_blocks, "changes blocks.3.average in every forward pass"),
    ],
)
def test_what_cannot_be_cut_is_found_before_any_process_starts(job: Job, says: str) -> None:
    facts = replace(describe(job), moved=())
    resolved = check(job, facts, Strategy.parse("pp=2:1f1b"), place(ranks=2))
    with pytest.raises(Refused, match=says):
        dry_run(job, facts, resolved)
    dry_run(job, facts, Strategy.parse("ddp").resolve(2))


def test_a_codebook_is_moved_by_whole_batches() -> None:
    job = pipeline_jobs.averaging_blocks
    with pytest.raises(Refused, match=r"forward changes blocks\.\d\.average by the samples .* 8 micro-batches"):
        check(job, describe(job), Strategy.parse("pp=2:1f1b"), place(ranks=2))


def test_ranks_that_do_not_fit() -> None:
    assert "single runs on 1 rank, but 2 were given" in refusal("single", place(ranks=2))
    assert "fsdp=4 would fit" in refusal("fsdp=3", place(ranks=4))


@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2"])
def test_parameters_in_host_memory_need_shards(data: str) -> None:
    message = refusal(f"{data},offload=params", place(ranks=2))
    assert "offload=params" in message
    assert "needs fsdp or hsdp" in message
    assert data in message


def test_parameters_in_host_memory_of_one_process() -> None:
    assert "needs fsdp or hsdp" in refusal("single,offload=params", place(ranks=1))


def test_a_batch_smaller_than_the_ranks() -> None:
    message = refusal("ddp", place(ranks=4), batch=3)
    assert "global batch of 3 is smaller than the 4 data ranks" in message
    assert "at most 3 ranks" in message


@pytest.mark.parametrize(("batch", "ranks", "limit"), [(8, 2, 4), (7, 2, 4), (8, 4, 2)])
def test_a_micro_batch_larger_than_what_a_rank_has(batch: int, ranks: int, limit: int) -> None:
    text = f"ddp,mb={limit + 1}"
    message = refusal(text, place(ranks=ranks), batch=batch)
    assert f"mb={limit + 1} is more than the {limit} samples" in message
    assert f"use mb={limit} or less" in message
    check(make_job(global_batch=batch), FACTS, Strategy.parse(f"ddp,mb={limit}"), place(ranks=ranks))


def test_more_ranks_than_gpus() -> None:
    message = refusal("ddp", place("cuda", ranks=2, devices=1))
    assert "2 ranks need as many GPUs, but this machine has 1" in message
    assert "--ranks 1" in message
    assert "--device cpu" in message


def test_gpus_are_counted_on_one_node() -> None:
    """16 ranks on two nodes of 8 GPUs each."""
    assert check(make_job(global_batch=16), FACTS, Strategy.parse("ddp"), place("cuda", ranks=16, local_ranks=8))


def test_more_ranks_than_cores_is_allowed() -> None:
    assert check(JOB, FACTS, Strategy.parse("ddp"), place(ranks=8, devices=2))


@pytest.mark.parametrize(
    ("text", "device", "facts", "advice"),
    [
        ("dp", "cpu", FACTS, "use ddp"),
        ("dp", "cuda", BATCH_NORM, "use ddp"),
        ("dp,bf16", "cuda", FACTS, "use ddp,bf16 or dp,bf16:pure"),
        ("dp,compile", "cuda", FACTS, "use ddp,compile"),
    ],
)
def test_data_parallel_names_what_to_use(text: str, device: str, facts: ModelFacts, advice: str) -> None:
    assert advice in refusal(text, place(device, ranks=2), facts)


@pytest.mark.parametrize("text", ["dp", "dp,bf16:pure"])
def test_data_parallel_runs_on_gpus(text: str) -> None:
    assert check(JOB, FACTS, Strategy.parse(text), place("cuda", ranks=2)).data_size == 2


def test_batch_norm_is_not_recomputed_in_compiled_blocks() -> None:
    assert "BatchNorm (norm)" in refusal("ddp,compile,ac=full", place(ranks=2), BATCH_NORM)
    assert check(JOB, BATCH_NORM, Strategy.parse("ddp,compile"), place(ranks=2))


@pytest.mark.parametrize("text", ["fsdp,compile", "fsdp,pp=2:1f1b"])
def test_ranks_agree_on_used_parameters_under_fsdp(text: str) -> None:
    facts = replace(FACTS, by_value=True)
    assert "looks at values" in refusal(text, place(ranks=4), facts)
    assert check(JOB, facts, Strategy.parse("fsdp"), place(ranks=4))


@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "hsdp=1x2"])
def test_a_parameter_without_dims(data: str) -> None:
    assert check(JOB, replace(FACTS, parameters=(WEIGHT, SCALE)), Strategy.parse(data), place(ranks=2))


def test_a_model_without_a_job() -> None:
    """There is no global batch to hold against the ranks."""
    assert str(check_strategy(FACTS, Strategy.parse("zero2,mb=64"), place(ranks=8))) == "zero2=8,mb=64"
    with pytest.raises(Refused):
        check_strategy(FACTS, Strategy.parse("dp"), place(ranks=8))


def test_every_reason_is_a_sentence() -> None:
    for text, where in [("dp", place(ranks=2)), ("ddp,offload=params", place(ranks=2)), ("ddp", place(ranks=9))]:
        assert refusal(text, where).endswith(".")
