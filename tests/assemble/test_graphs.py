"""Replayed passes, with a stand-in for CUDA graphs: it calls the recorded function on the graph's own tensors."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import nan
from typing import Any

import pytest
import torch
from torch import nn

import tiny_jobs
from meshwright import Job, Strategy
from meshwright.assemble import step as step_module
from meshwright.assemble.check import check
from meshwright.assemble.graphs import WARM_UP, GraphedPasses
from meshwright.assemble.low_copies import LowCopies
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.dtypes import DTYPES
from meshwright.describe.model import describe
from meshwright.errors import JobError, Refused
from meshwright.facts.model import ModelFacts
from meshwright.strategies import Place

CPU = torch.device("cpu")
ON_GPU = Place(device="cuda", devices=2, ranks=1, local_ranks=1)


class StandIn:
    """Records and replays as CUDA graphs do: recording computes nothing, replays write into the same tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.recorded, self.replays, self.reason = model, 0, 0, ""

    def watch(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, str]:
        return run(), self.reason

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        self.recorded += 1
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        sums, made = self._without_effect(run, parameters)

        def replay() -> None:
            self.replays += 1
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            sums.copy_(run())
            for parameter, own, old in zip(parameters, made, before, strict=True):
                if old is None and own is not None:
                    own.copy_(parameter.grad)

        return sums, replay

    def _without_effect(self, run: Callable[[], torch.Tensor], parameters: list[nn.Parameter]) -> Any:
        states = [t.clone() for t in (*self.model.buffers(), *(p.grad for p in parameters if p.grad is not None))]
        kept = [*self.model.buffers(), *(p.grad for p in parameters if p.grad is not None)]
        old = [p.grad for p in parameters]
        sums = run().fill_(nan)
        made = [p.grad for p in parameters]
        for gradient, before in zip(made, old, strict=True):
            if before is None and gradient is not None:
                gradient.fill_(nan)
        for tensor, state in zip(kept, states, strict=True):
            tensor.copy_(state)
        return sums, made


@cache
def facts_of(job: Job) -> ModelFacts:
    return describe(job)


def trainer_of(job: Job, text: str) -> Trainer:
    return Trainer(job, facts_of(job), Strategy.parse(text).resolve(1), World(device=CPU), seed=0)


def graphed(job: Job, text: str) -> tuple[Trainer, StandIn]:
    """A trainer whose passes are replayed by a stand-in."""
    trainer = trainer_of(job, f"{text},graphs")
    model, plain = trainer.engine.model, trainer.passes
    recorder = StandIn(model)
    copies = LowCopies(model, DTYPES[trainer.strategy.precision])
    trainer.passes = GraphedPasses(
        trainer.engine,
        plain._losses,
        plain._dropout,
        copies,
        recorder,
        counts=True,  # type: ignore[attr-defined]
    )
    return trainer, recorder


def batches(job: Job, number: int, size: int | None = None) -> list[Any]:
    found = []
    for index in range(number):
        torch.manual_seed(index)
        found.append(job.sample(size or job.global_batch))
    return found


def losses_of(trainer: Trainer, given: list[Any]) -> list[float]:
    return [trainer.step(batch).loss for batch in given]


def same_parameters(one: Trainer, other: Trainer) -> bool:
    pairs = zip(one.engine.state(), other.engine.state(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@cache
def without_dropout(job: Job) -> Job:
    def build() -> nn.Module:
        model = job.model()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        return model

    return replace(job, model=build)


TRANSFORMER = without_dropout(tiny_jobs.transformer)


TEXTS = ["single", "single,bf16", "single,fp16", "single,bf16,mb=2"]
OTHERS = ["masked", "partial", "convolutions"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("transformer", "single,fp16"), ("masked", "single,bf16,mb=2"), ("convolutions", "single,bf16")]
    + [pytest.param("transformer", text, marks=pytest.mark.thorough) for text in TEXTS]
    + [pytest.param(name, text, marks=pytest.mark.thorough) for name in OTHERS for text in TEXTS],
)
def test_replayed_steps_equal_plain_ones(name: str, text: str) -> None:
    job = without_dropout(getattr(tiny_jobs, name))
    if name == "convolutions" and "mb" in text:
        pytest.skip("BatchNorm would see parts of a batch")
    given = batches(job, WARM_UP + 3)
    plain, (replayed, recorder) = trainer_of(job, text), graphed(job, text)
    assert losses_of(replayed, given) == losses_of(plain, given)
    assert same_parameters(replayed, plain)
    per_step = 4 if "mb" in text else 1
    assert recorder.recorded == min(2, per_step), "one graph for a step's first micro-batch, one for the others"
    assert recorder.replays == per_step * (4 if "mb" in text else 3), "warm-up passes count, not steps"


def test_other_shapes_run_plainly_until_they_have_a_graph() -> None:
    given = batches(TRANSFORMER, 5)
    ragged = batches(TRANSFORMER, 4, size=3)
    order = [*given[:4], ragged[0], given[4], *ragged[1:]]
    plain, (replayed, recorder) = trainer_of(TRANSFORMER, "single,bf16"), graphed(TRANSFORMER, "single,bf16")
    assert losses_of(replayed, order) == losses_of(plain, order)
    assert same_parameters(replayed, plain)
    assert recorder.recorded == 2
    assert recorder.replays == 3 + 2


def test_a_change_of_the_loss_scale_reaches_a_graph() -> None:
    given = batches(TRANSFORMER, 6)
    plain, (replayed, _) = trainer_of(TRANSFORMER, "single,fp16"), graphed(TRANSFORMER, "single,fp16")
    for trainer in (plain, replayed):
        losses_of(trainer, given[:4])
        assert trainer.loss_scale is not None
        trainer.loss_scale.value = 64.0
    assert losses_of(replayed, given[4:]) == losses_of(plain, given[4:])
    assert same_parameters(replayed, plain)


def test_graphs_are_recorded_again_when_a_parameter_moves() -> None:
    given = batches(TRANSFORMER, 6)
    plain, (replayed, recorder) = trainer_of(TRANSFORMER, "single"), graphed(TRANSFORMER, "single")
    for trainer in (plain, replayed):
        losses_of(trainer, given[:4])
        weight = next(trainer.engine.model.parameters())
        weight.data = weight.data.clone()
    assert losses_of(replayed, given[4:]) == losses_of(plain, given[4:])
    assert recorder.recorded == 2


def test_random_numbers_of_the_host_are_not_frozen_into_a_graph() -> None:
    job = tiny_jobs.transformer  # its dropout draws on the CPU
    given = batches(job, 5)
    plain, (replayed, recorder) = trainer_of(job, "single"), graphed(job, "single")
    with pytest.warns(UserWarning, match="draws random numbers on the host"):
        found = losses_of(replayed, given)
    assert found == losses_of(plain, given)
    assert recorder.recorded == 0


class Skipping(tiny_jobs.Plain):
    """Skips its second half by chance, as stochastic depth does."""

    def forward(self, *args: Any) -> Any:
        y = super().forward(*args)
        return y if random.random() < 0.5 else y * 2


def test_branches_by_chance_are_not_frozen_either() -> None:
    job = replace(tiny_jobs.plain, model=Skipping)
    given = batches(job, 8)
    plain, (replayed, recorder) = trainer_of(job, "single"), graphed(job, "single")
    with pytest.warns(UserWarning, match="draws random numbers on the host"):
        found = losses_of(replayed, given)
    assert found == losses_of(plain, given)
    assert recorder.recorded == 0


def test_a_pass_that_waits_for_the_device_runs_plainly_with_one_warning() -> None:
    trainer, recorder = graphed(TRANSFORMER, "single")
    recorder.reason = "it waits for the device"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses_of(trainer, [*batches(TRANSFORMER, 4), *batches(TRANSFORMER, 3, size=3)])
    assert [str(one.message) for one in told if "graphs" in str(one.message)] == [
        "graphs: a pass cannot be recorded, because it waits for the device; it runs as without."
    ]
    assert recorder.recorded == 0


def test_a_failed_recording_names_the_term() -> None:
    trainer, recorder = graphed(TRANSFORMER, "single")
    losses_of(trainer, batches(TRANSFORMER, WARM_UP))

    def fail(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder.record = fail  # type: ignore[method-assign]
    with pytest.raises(JobError, match=r"graphs could not record .* stream is capturing"):
        trainer.step(batches(TRANSFORMER, 1)[0])


class Counting(tiny_jobs.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        return super().forward(*args) * (1 + self.calls)


@pytest.mark.parametrize(
    ("text", "ranks", "reason"),
    [
        ("fsdp,graphs", 2, "which fsdp needs; use single or ddp"),
        ("zero1,graphs", 2, "which zero1 needs"),
        ("tp=2,graphs", 2, "graphs is not built for tp"),
        ("pp=2,graphs", 2, "graphs is not built for pp"),
        ("single,ac=full,graphs", 1, "drop ac=full, or graphs"),
        ("ddp,offload=optimizer,graphs", 2, "drop offload=optimizer"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(text: str, ranks: int, reason: str) -> None:
    place = replace(ON_GPU, ranks=ranks, local_ranks=ranks)
    with pytest.raises(Refused, match=reason):
        check(TRANSFORMER, facts_of(TRANSFORMER), Strategy.parse(text), place)


def test_models_that_cannot_be_replayed_are_refused_by_name() -> None:
    counting, two = replace(tiny_jobs.plain, model=Counting), replace(ON_GPU, ranks=2, local_ranks=2)
    with pytest.raises(Refused, match=r"the model's forward changes calls"):
        check(counting, describe(counting), Strategy.parse("single,graphs"), ON_GPU)
    with pytest.raises(Refused, match="synchronised BatchNorm"):
        check(tiny_jobs.convolutions, describe(tiny_jobs.convolutions), Strategy.parse("ddp,graphs"), two)
    with pytest.raises(Refused, match="graphs needs a GPU, and this would run on the CPU; drop it from"):
        check(TRANSFORMER, facts_of(TRANSFORMER), Strategy.parse("ddp,graphs"), replace(two, device="cpu"))


def test_a_gpu_may_replay_single_and_ddp() -> None:
    facts, two = facts_of(TRANSFORMER), replace(ON_GPU, ranks=2, local_ranks=2)
    assert str(check(TRANSFORMER, facts, Strategy.parse("single,bf16,graphs"), ON_GPU)) == "single,bf16,graphs"
    assert check(TRANSFORMER, facts, Strategy.parse("ddp,bf16,compile,graphs"), two).graphs


class OnDevice(tiny_jobs.Transformer):
    """Without a tensor that each pass copies from the host."""

    def __init__(self) -> None:
        super().__init__()
        shift = self.shift
        del self.shift
        self.register_buffer("shift", shift, persistent=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", ["single,bf16", "single,bf16,mb=2", "single"])
def test_cuda_graphs_equal_plain_steps(text: str) -> None:
    job, given = replace(tiny_jobs.transformer, model=OnDevice), batches(tiny_jobs.transformer, 6)  # with dropout
    world = World(device=torch.device("cuda", 0))
    facts = describe(job)
    made = [Trainer(job, facts, Strategy.parse(one).resolve(1), world, seed=0) for one in (text, f"{text},graphs")]
    plain, replayed = made
    assert losses_of(replayed, given) == losses_of(plain, given)
    assert same_parameters(replayed, plain)
    assert isinstance(replayed.passes, step_module.GraphedPasses)
    assert replayed.passes._graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_from_the_host_in_each_pass_is_not_recorded() -> None:
    job, world = tiny_jobs.transformer, World(device=torch.device("cuda", 0))
    trainer = Trainer(job, facts_of(job), Strategy.parse("single,graphs").resolve(1), world, seed=0)
    with pytest.warns(UserWarning, match="it waits for the device, to read a value or to copy from the host"):
        losses_of(trainer, batches(job, 3))
