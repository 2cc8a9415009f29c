"""One rank's step on fake tensors in a fake world: memory, operators and messages."""

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD

from meshwright import Job
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.strategy import Strategy
from meshwright.tracing import recorder, trace_roles, trace_step
from meshwright.tracing.block_stack import BlockStack, find_period, find_repeated_blocks, whole_periods
from meshwright.tracing.step_counts import Messages
from traced_decoders import (
    CUBLAS,
    LAYERS,
    LENGTH,
    SAMPLES,
    VOCABULARY,
    WIDTH,
    Decoder,
    facts_of,
    job_of,
    sent,
    trace,
    weights,
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


class Local(nn.Module):
    """A layer that keeps more if it is of the other kind, with the same parameters and FLOPs."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layer, self.place, self.kind = nn.Linear(WIDTH, WIDTH), place, "whole" if place % 4 == 3 else "local"

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.layer(x))
        return x + (found if self.kind == "local" else found.sin().tanh().sin())


def local_and_whole(blocks: int) -> Job:
    return Job(
        model=lambda: nn.Sequential(*map(Local, range(blocks))),
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output.sum(), len(batch)),
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, LENGTH, WIDTH),
        global_batch=64,
    )


@pytest.mark.parametrize("strategy", ["single", "single,compile"])
def test_kinds_of_blocks_are_extrapolated_in_proportion(strategy: str) -> None:
    """Of four blocks, one keeps more: a model with two of them has none."""
    job = local_and_whole(24)
    facts = describe(job)
    found, whole = (trace_step(job, facts, Strategy.parse(strategy), ranks=1, whole=each) for each in (False, True))
    assert found.peak == pytest.approx(whole.peak, rel=0.002)


def test_after_how_many_blocks_their_kinds_recur() -> None:
    assert find_period(local_and_whole(24), BlockStack("", 24)) == 4
    assert find_period(local_and_whole(5), BlockStack("", 5)) is None
    assert find_period(local_and_whole(3), BlockStack("", 3)) == 1
    assert [whole_periods(sizes, 4) for sizes in ((2, 4), (4, 8), (3, 5))] == [(4, 8)] * 3
    assert whole_periods((3, 6), 1) == (3, 6)


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
