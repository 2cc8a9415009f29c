"""One rank's step on fake tensors in a fake world: memory, operators and messages."""

import gc
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, AdamW

from meshwright import Job
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.strategies.tensor import replay
from meshwright.strategies.tensor.compiled import MADE
from meshwright.tracing import recorder, trace_roles, trace_step
from meshwright.tracing.block_stack import find_repeated_blocks
from meshwright.tracing.step_counts import Messages

WIDTH, LENGTH, VOCABULARY, SAMPLES, LAYERS = 64, 32, 512, 16, 2
CUBLAS = 64 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["x"].flatten(), reduction="sum"), batch["x"].numel()


@cache
def job_of(layers: int = LAYERS) -> Job:
    return Job(
        model=partial(Decoder, layers),
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=partial(AdamW, lr=1e-3),
        sample=lambda n: {"x": torch.randint(VOCABULARY, (n, LENGTH))},
        global_batch=SAMPLES,
        max_norm=1.0,
    )


@cache
def facts_of(job: Job):
    return describe(job)


@cache
def trace(strategy: str, ranks: int = 1, rank: int = 0, layers: int = LAYERS, whole: bool = False) -> Trace:
    job = job_of(layers)
    return trace_step(job, facts_of(job), Strategy.parse(strategy), ranks=ranks, rank=rank, whole=whole)


def weights(layers: int = LAYERS) -> int:
    return 2 * VOCABULARY * WIDTH + layers * (WIDTH + 12 * WIDTH * WIDTH)


def sent(trace: Trace, kind: str, axis: str, phase: str | None = None) -> float:
    return sum(
        message.bytes * message.count
        for message in trace.messages
        if (message.kind, message.axis) == (kind, axis) and phase in (None, message.phase)
    )


def test_what_lasts_is_counted_to_the_byte() -> None:
    memory = trace("single").memory
    assert memory["parameters"] == pytest.approx(4 * weights(), rel=0.01)
    assert memory["optimizer"] == pytest.approx(8 * weights(), rel=0.02)  # with a step counter for each parameter
    logits = 4 * SAMPLES * LENGTH * VOCABULARY
    assert memory["logits"] == pytest.approx(3 * logits, rel=0.01)  # they, their log-softmax and a gradient
    assert memory["temporary"] == pytest.approx(CUBLAS, rel=0.01)


def test_activations_are_what_the_kernels_keep() -> None:
    rows = SAMPLES * LENGTH
    # Per block in fp32: the input and normalised; q, k, v in one and the mixed; the sum; before and after silu.
    block = 4 * rows * WIDTH * (2 + 3 + 1 + 1 + 4 + 4) + 4 * rows + 4 * SAMPLES * 4 * 32
    ids = 8 * rows
    embedded = 4 * rows * WIDTH
    assert trace("single").memory["activations"] == pytest.approx(LAYERS * block + embedded + ids, rel=0.02)


def test_flops_of_forward_and_backward() -> None:
    flops: Counter[str] = Counter()
    for operation in trace("single").operations:
        if operation.kind == "matmul":
            flops[operation.phase] += operation.flops * operation.count
    matrices = LAYERS * 12 * WIDTH * WIDTH + VOCABULARY * WIDTH
    assert flops["forward"] == 2 * SAMPLES * LENGTH * matrices
    assert flops["backward"] == 2 * flops["forward"]


def test_a_matmul_has_its_shape() -> None:
    shapes = {operation.shape: operation.count for operation in trace("single").operations if operation.shape}
    assert shapes[1, SAMPLES * LENGTH, 4 * WIDTH, WIDTH] >= LAYERS


def test_the_update_reads_and_writes_all_states() -> None:
    moved = max(op.bytes for op in trace("single").operations if op.phase == "update")
    assert moved == pytest.approx(4 * weights() * 7, rel=0.05)  # four are read, three written


def test_ddp_sums_every_gradient_once() -> None:
    found = trace("ddp", 8)
    assert sent(found, "all_reduce", "data", "backward") == pytest.approx(4 * weights(), rel=0.01)
    assert found.peak < trace("single").peak


def test_fsdp_gathers_twice_and_scatters_once() -> None:
    found = trace("fsdp", 8)
    blocks = 4 * LAYERS * (WIDTH + 12 * WIDTH * WIDTH)
    root = 4 * weights() - blocks
    assert sent(found, "all_gather", "data") == pytest.approx(2 * blocks + root, rel=0.01)
    assert sent(found, "reduce_scatter", "data") == pytest.approx(4 * weights(), rel=0.01)
    assert found.memory["parameters"] == pytest.approx(4 * weights() / 8, rel=0.05)
    assert found.memory["gathered"] >= root


@pytest.mark.parametrize(
    "strategy",
    ["fsdp", *(pytest.param(s, marks=pytest.mark.thorough) for s in ("zero2,bf16", "fsdp:grad-op", "hsdp=2x2"))],
)
def test_sharded_gradients_are_reduced_in_each_micro_batch_or_once(strategy: str) -> None:
    """Four micro-batches on each of four ranks. Reduced in each, gradients rest in shards; once, they rest whole.

    The difference of the peaks is less than that: while a unit's gradients are reduced, they are whole in both.
    """
    layers, axis, shards = 8, "shard" if "hsdp" in strategy else "data", 2 if "hsdp" in strategy else 4
    each, last = (trace(f"{strategy},mb=1{how}", 4, layers=layers) for how in ("", ",sync=last"))
    assert sent(last, "reduce_scatter", axis) == pytest.approx(4 * weights(layers), rel=0.01)
    assert sent(each, "reduce_scatter", axis) == pytest.approx(4 * sent(last, "reduce_scatter", axis))
    assert last.peak - each.peak > 0.5 * (1 - 1 / shards) * 4 * weights(layers)


@pytest.mark.parametrize("strategy", ["fsdp,pp=2:1f1b", pytest.param("zero2,pp=2:1f1b", marks=pytest.mark.thorough)])
def test_a_stage_reduces_in_each_micro_batch_or_once(strategy: str) -> None:
    """Eight micro-batches on each of two data ranks."""
    layers = 8
    each, last = (trace(f"{strategy},mb=1{how}", 4, layers=layers) for how in ("", ",sync=last"))
    assert sent(each, "reduce_scatter", "data") == pytest.approx(8 * sent(last, "reduce_scatter", "data"))
    # Half of a stage's gradients is in the other rank's shard; while a unit's are reduced, they are whole in both.
    assert last.peak - each.peak > 0.15 * 4 * weights(layers) / 2


@pytest.mark.parametrize(
    ("strategy", "kind", "axis"),
    [
        ("ddp", "all_reduce", "data"),
        ("zero2", "reduce_scatter", "data"),
        ("fsdp", "reduce_scatter", "data"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("zero1", "reduce_scatter", "data"),
                ("fsdp:grad-op,mb=1", "reduce_scatter", "data"),
                ("zero2,mb=1,sync=last", "reduce_scatter", "data"),
                ("hsdp=2x2", "reduce_scatter", "shard"),
                ("hsdp=2x2", "all_reduce", "replica"),
                ("ddp,pp=2:1f1b", "all_reduce", "data"),
                ("zero1,pp=2:1f1b", "reduce_scatter", "data"),
                ("fsdp,pp=2:1f1b", "reduce_scatter", "data"),
            )
        ),
    ],
)
def test_gradients_that_are_reduced_in_bf16_are_half_the_bytes(strategy: str, kind: str, axis: str) -> None:
    full, half = (trace(f"{strategy},bf16{how}", 4) for how in ("", ",reduce=bf16"))
    whole, rounded = (sent(found, kind, axis, "backward") for found in (full, half))
    assert 0 < rounded == pytest.approx(whole / 2, rel=0.001)
    assert sent(half, "all_gather", axis) == sent(full, "all_gather", axis)


@pytest.mark.parametrize("strategy", ["zero1,bf16", "zero2", "hsdp=2x4", "fsdp:grad-op,bf16", "single,fp16,mb=8"])
def test_every_data_strategy_is_traced(strategy: str) -> None:
    ranks = 1 if strategy.startswith("single") else 8
    found = trace(strategy, ranks)
    assert found.peak > CUBLAS and found.reserved >= found.peak
    assert {operation.phase for operation in found.operations} == {"forward", "backward", "update"}


def test_recomputing_keeps_less_and_computes_more() -> None:
    plain, full = trace("single"), trace("single,ac=full")
    assert full.memory["activations"] < 0.5 * plain.memory["activations"]
    matmuls = [
        sum(op.flops * op.count for op in found.operations if (op.kind, op.phase) == ("matmul", "backward"))
        for found in (plain, full)
    ]
    assert matmuls[1] >= 1.25 * matmuls[0]  # blocks are a half of all


def test_offloaded_states_are_not_on_the_device() -> None:
    counters = 512 * (2 + 5 * LAYERS)
    assert trace("single,offload=optimizer").memory.get("optimizer", 0) <= counters


def test_tensor_parallel_divides_and_says_so() -> None:
    found = trace("tp=2", 2)
    assert found.memory["parameters"] < 0.6 * trace("single").memory["parameters"]
    assert sent(found, "all_gather", "tensor") > 0


def test_a_tensor_axis_runs_the_programs_that_training_runs() -> None:
    """Attention keeps the joint product of query, key and value alive, and its output is copied to be sent."""
    shape = Shape(layers=3, width=64, heads=8, kv_heads=4, feed_forward=128, vocabulary=64, length=256)
    job = decoder_job(shape, global_batch=8)
    programs = trace_step(job, describe(job), Strategy.parse("tp=2,bf16"), ranks=2)
    with patch.object(replay, "_enabled", False):
        plain = trace_step(job, describe(job), Strategy.parse("tp=2,bf16"), ranks=2)
    query_key_output = (64 + 32 + 64) * 8 * 256 * 2 // 2
    # A head keeps its gathered input as it came, or in order: then it is no message's memory.
    kept = [found.memory["activations"] + found.memory.get("communication", 0) for found in (programs, plain)]
    assert kept[0] - kept[1] == 3 * query_key_output
    assert sent(programs, "all_gather", "tensor") == sent(plain, "all_gather", "tensor")
    summed = [sum(m.count for m in found.messages if m.kind == "all_reduce") for found in (programs, plain)]
    assert summed[0] < summed[1]  # the gradients of a block's norms are one message


def test_compiled_programs_send_the_same_and_launch_less() -> None:
    compiled, eager = (trace(strategy, 2, layers=10) for strategy in ("tp=2,compile", "tp=2"))
    assert compiled.messages and Counter(compiled.messages) == Counter(eager.messages)
    launches = [sum(operation.count for operation in found.operations) for found in (compiled, eager)]
    assert launches[0] < launches[1]
    assert not compiled.unseen
    assert compiled.peak == trace("tp=2,compile", 2, layers=10, whole=True).peak


class Routed(nn.Module):
    """Runs only the samples whose first feature is positive, and asks how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        if bool((x[chosen] > -9).all()):
            return x.index_add(0, chosen, self.inner(x[chosen]))
        return x


@pytest.mark.parametrize("strategy", ["fsdp", "zero2,ac=full"])
def test_a_divided_model_that_reads_values(strategy: str) -> None:
    job = Job(
        model=lambda: nn.Sequential(*(Routed() for _ in range(2))),
        inputs=lambda batch: (batch["x"],),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=SGD,
        global_batch=SAMPLES,
        sample=lambda n: {"x": torch.ones(n, WIDTH)},
    )
    found = trace_step(job, describe(job), Strategy.parse(strategy), ranks=2)
    assert found.peak > 0 and not found.unseen


def test_no_program_of_a_trace_is_left() -> None:
    before = dict(MADE)
    trace("tp=2,compile", 2, layers=1)
    assert before == MADE


@pytest.mark.parametrize("strategy", ["ddp,mb=2", "fsdp", "tp=2", "op=2", "pp=2:1f1b,mb=2"])
def test_a_trace_does_not_depend_on_the_garbage_collector(strategy: str) -> None:
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(10, 2, 2)
        often = trace(strategy, 2)
        gc.disable()
        assert trace(strategy, 2).memory == often.memory
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


def test_roles_of_a_pipeline() -> None:
    job = job_of()
    first, last = trace_roles(job, facts_of(job), Strategy.parse("pp=2:1f1b"), 2)
    assert (first.stages, last.stages) == ((0,), (1,))
    boundary = 4 * SAMPLES * LENGTH * WIDTH
    assert sent(first, "send", "stage", "forward") == boundary
    assert sent(last, "send", "stage") == boundary
    assert "logits" not in first.memory and last.memory["logits"] > 0


def test_without_a_pipeline_there_is_one_role() -> None:
    job = job_of()
    assert [found.rank for found in trace_roles(job, facts_of(job), Strategy.parse("ddp"), 4)] == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "layers"),
    [
        ("fsdp,bf16", 16),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("ddp", 16), ("fsdp,tp=2,bf16,ac=full", 10))),
    ],
)
def test_a_long_model_is_known_from_shorter_ones(strategy: str, layers: int) -> None:
    short, whole = (trace(strategy, 4, layers=layers, whole=whole) for whole in (False, True))
    assert short.peak - CUBLAS == pytest.approx(whole.peak - CUBLAS, rel=0.01)
    for cause in ("activations", "logits", "optimizer"):
        assert short.memory[cause] == pytest.approx(whole.memory[cause], rel=0.01)
    assert short.reserved == pytest.approx(whole.reserved, rel=0.05)
    for name in ("flops", "bytes"):
        totals = [sum(getattr(op, name) * op.count for op in found.operations) for found in (short, whole)]
        assert totals[0] == pytest.approx(totals[1], rel=0.001)
    messages = [sum(message.bytes * message.count for message in found.messages) for found in (short, whole)]
    assert messages[0] == pytest.approx(messages[1], rel=0.001)


def test_blocks_that_differ_are_no_stack() -> None:
    def build() -> nn.Module:
        model = Decoder(3)
        model.blocks[1].up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        model.blocks[1].down = nn.Linear(8 * WIDTH, WIDTH, bias=False)
        return model

    assert find_repeated_blocks(facts_of(job_of())) is not None
    assert find_repeated_blocks(describe(replace(job_of(), model=build))) is None


def test_an_optimizer_that_was_left_open_updates_lists() -> None:
    job = replace(job_of(), optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9))
    found = trace_step(job, facts_of(job_of()), Strategy.parse("single"), ranks=1)
    assert sum(operation.count for operation in found.operations if operation.phase == "update") < 20


def test_what_cannot_be_traced_is_refused() -> None:
    job = job_of()
    with pytest.raises(Refused, match="dp is one process"):
        trace_step(job, facts_of(job), Strategy.parse("dp=2"), ranks=2)
    with pytest.raises(Refused, match="CUDA device"):
        trace_step(job, facts_of(job), Strategy.parse("single"), ranks=1, device="cpu")


@pytest.mark.slow
def test_worlds_of_one_process_do_not_meet() -> None:
    """DTensor's caches would hand the second rank the first one's groups."""
    first, last = (trace("pp=2:1f1b,fsdp=2", 4, rank=rank) for rank in (0, 2))
    assert (first.stages, last.stages) == ((0,), (1,))
    assert sent(last, "reduce_scatter", "data") > 0


def test_views_are_made_as_a_fake_mode_makes_them() -> None:
    def views(x: Tensor) -> list[Tensor]:
        return [
            x.view(6, 2),
            x.t(),
            x.detach(),
            x[1:],
            x[0],
            x.unsqueeze(0),
            x.expand(2, 4, 3),
            *x.split(2),
            *x.unbind(),
        ]

    assert all(operator.is_view for operator in recorder._VIEWS)
    with FakeTensorMode():
        x = torch.empty(4, 3)
        plain = [(v.shape, v.stride(), v.storage_offset(), v.device) for v in views(x)]
        with recorder.StepRecorder(Messages()) as active:
            found = views(x)
            assert [(v.shape, v.stride(), v.storage_offset(), v.device) for v in found] == plain
            assert {v.untyped_storage()._cdata for v in found} == {x.untyped_storage()._cdata}
        assert active.ledger.events == []
