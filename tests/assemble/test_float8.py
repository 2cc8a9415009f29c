"""Linear layers in float8: their arithmetic, which layers they are, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_jobs
from meshwright import Job, Strategy
from meshwright.assemble import float8
from meshwright.assemble.check import check
from meshwright.assemble.float8 import float8_layers
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.commands.layout import show_layout
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.model import ModelFacts
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.recording.blueprint import record
from meshwright.strategies import Place, float8_casts
from meshwright.strategies.float8_casts import rounded, rounded_and_turned, turned
from meshwright.strategies.float8_linear import E4M3, E5M2, float8_linear, scale_of
from meshwright.verify.plain_training import seeded_batch

CPU = World(device=torch.device("cpu"))


@cache
def facts_of(job: Job) -> ModelFacts:
    return describe(job)


@pytest.fixture
def small_layers() -> Iterator[None]:
    with patch.object(float8, "SMALLEST", 1):
        yield


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-6, 0.3, 1.0, 7.0, 1e5])
def test_a_scale_is_the_largest_power_of_two_without_an_overflow(size: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor([-size, size / 3])
    scale = float(scale_of(tensor, dtype))
    largest = torch.finfo(dtype).max
    assert torch.frexp(torch.tensor(scale)).mantissa == 0.5
    assert size * scale <= largest < 2.0001 * size * scale
    assert torch.isfinite(rounded(tensor, scale_of(tensor, dtype), dtype).float()).all()


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    assert not rounded(torch.zeros(4), scale_of(torch.zeros(4), E4M3), E4M3).float().any()
    weight = torch.ones(16, 16, dtype=torch.bfloat16)
    for bad in (float("nan"), float("inf")):
        x = torch.ones(16, 16, dtype=torch.bfloat16)
        x[3, 3] = bad
        assert not torch.isfinite(float8_linear(x, weight)[3]).any()


def emulated(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor rounded to float8, in float64."""
    scale = scale_of(tensor, dtype)
    return rounded(tensor, scale, dtype).double() / scale.double()


@pytest.mark.parametrize("rows", [(32,), (3, 7)])
@pytest.mark.parametrize("biased", [True, False])
def test_products_are_those_of_rounded_factors(rows: tuple[int, ...], biased: bool) -> None:
    x, weight, bias = torch.randn(*rows, 64), torch.randn(48, 64) / 8, torch.randn(48)
    low = [tensor.bfloat16().requires_grad_() for tensor in (x, weight, bias)]
    found = float8_linear(low[0], low[1], low[2] if biased else None)
    gradient = torch.randn(*rows, 48).bfloat16()
    found.backward(gradient)
    x8, weight8, gradient8 = emulated(low[0], E4M3), emulated(low[1], E4M3), emulated(gradient, E5M2)
    near = {"rtol": 2.0**-7, "atol": 2.0**-5}
    torch.testing.assert_close(found.double(), F.linear(x8, weight8, low[2].double() if biased else None), **near)
    assert low[0].grad is not None and low[1].grad is not None
    torch.testing.assert_close(low[0].grad.double(), gradient8 @ weight8, **near)
    expected = gradient8.reshape(-1, 48).t() @ x8.reshape(-1, 64)
    torch.testing.assert_close(low[1].grad.double(), expected, **near)


def test_rounding_does_not_depend_on_the_other_samples() -> None:
    """Scales are powers of two, so a micro-batch is rounded as the whole batch is, except where numbers underflow."""
    signs = torch.randn(64, 32).sign()
    x = (signs * (1 + torch.rand(64, 32)) * torch.logspace(0, 1.5, 64)[:, None]).bfloat16()
    weight = torch.randn(16, 32)
    whole = float8_linear(x, weight.bfloat16())
    parts = [float8_linear(part, weight.bfloat16()) for part in x.split(16)]
    assert torch.equal(torch.cat(parts), whole)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(64, 128), (100, 48), (1, 16), (300, 272)])
def test_a_matrix_is_rounded_in_both_orders(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, device=device, dtype=torch.bfloat16)
    for given in (matrix, matrix.t()):
        scale = scale_of(given, dtype)
        wanted = rounded(given, scale, dtype)
        plain, other = rounded_and_turned(given, scale, dtype)
        assert torch.equal(bits(plain), bits(wanted))
        assert torch.equal(bits(other), bits(wanted.t()))
        assert torch.equal(bits(turned(given, scale, dtype)), bits(wanted.t()))


@pytest.mark.parametrize("operator", [float8_casts._round_both, float8_casts._round_turned])
def test_the_operators_for_graphs_are_what_they_say(operator: Any) -> None:
    # On a machine with a GPU they are Triton's kernels.
    matrix = torch.randn(32, 16, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.library.opcheck(
        operator, (matrix, scale_of(matrix, E4M3), E4M3), test_utils=("test_schema", "test_faketensor")
    )


def test_frozen_weights_get_no_gradient() -> None:
    x, weight = torch.randn(16, 32).bfloat16().requires_grad_(), torch.randn(16, 32).bfloat16()
    float8_linear(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None


class Plainly(nn.Module):
    """No blocks: a first, an inner, a small, an odd and a last layer, and one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 64)
        self.inner = nn.Linear(64, 64)
        self.small = nn.Linear(64, 16)
        self.odd = nn.Linear(16, 64 + 3)
        self.back = nn.Linear(64 + 3, 64)
        self.tied = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.tied.weight
        self.last = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.inner, self.small, self.odd, self.back, self.tied, self.again):
            x = torch.tanh(layer(x))
        return self.last(x)


def test_layers_that_stay_in_bf16(small_layers: None) -> None:
    job = replace(tiny_jobs.plain, model=Plainly)
    facts = replace(facts_of(job), blocks=())
    assert float8_layers(record(job.model, seed=0).model, facts) == ["inner", "small"]
    with patch.object(float8, "SMALLEST", 64 * 64):
        assert float8_layers(record(job.model, seed=0).model, facts) == ["inner"]
    assert float8_layers(record(job.model, seed=0).model, facts, parts=2) == ["inner"], "half of 16 is not a multiple"
    facts = replace(facts, blocks=("small", "odd"))
    assert float8_layers(record(job.model, seed=0).model, facts) == ["small"], "what is before and after stays"


def test_layers_of_blocks(small_layers: None) -> None:
    job = tiny_jobs.transformer
    found = float8_layers(record(job.model, seed=0).model, facts_of(job))
    # The head is tied and outside of blocks; attention reads the weight of its `out_proj` itself.
    assert found == [f"blocks.{index}.{name}" for index in range(3) for name in ("up", "down")]
    document = show_layout(job, facts_of(job), Strategy.parse("ddp,fp8"), 2)
    assert document["float8"] == found


def losses(job: Job, text: str, steps: int = 4) -> list[float]:
    trainer = Trainer(job, facts_of(job), Strategy.parse(text).resolve(1), CPU, seed=0)
    return [trainer.step(seeded_batch(job, step)).loss for step in range(steps)]


def test_training_rounds_and_stays_near_bf16(small_layers: None) -> None:
    low, small = losses(tiny_jobs.transformer, "single,bf16"), losses(tiny_jobs.transformer, "single,fp8")
    assert low != small
    assert small == pytest.approx(low, rel=2.0**-6)
    assert (
        small
        == losses(tiny_jobs.transformer, "single,fp8,ac=full")
        == losses(tiny_jobs.transformer, "single,fp8,ac=selective")
    )


def test_small_models_train_as_under_bf16() -> None:
    assert losses(tiny_jobs.transformer, "single,fp8") == losses(tiny_jobs.transformer, "single,bf16")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_compiled_step_is_the_same(small_layers: None) -> None:
    compiled = losses(tiny_jobs.transformer, "single,fp8,compile", 2)
    assert compiled == pytest.approx(losses(tiny_jobs.transformer, "single,fp8", 2), rel=0.05)  # with other dropout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("op=2,fp8", "fp8 is not built for layers that op divides; use bf16, or fsdp or pp in place of op"),
        pytest.param(
            "zero1,fp8,engine=deepspeed",
            "not for engine=deepspeed",
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(text: str, reason: str) -> None:
    place = Place(device="cpu", devices=2, ranks=2, local_ranks=2)
    with pytest.raises(Refused, match=reason):
        check(tiny_jobs.transformer, facts_of(tiny_jobs.transformer), Strategy.parse(text), place)


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job, place = tiny_jobs.transformer, Place(device="cuda", devices=2, ranks=2, local_ranks=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(Refused, match="those of this machine do not; use bf16 in place of fp8"):
        check(job, facts_of(job), Strategy.parse("ddp,fp8"), place)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert check(job, facts_of(job), Strategy.parse("ddp,fp8"), place).precision == "fp8"


SMALL = Shape(layers=2, width=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=32, length=16)


def rule(count: int) -> dict[str, Tensor]:
    """Text in which a token follows from its place and the first one, most of the time."""
    steps = torch.arange(17)
    text = (torch.randint(32, (count, 1)) + 5 * steps + steps**2 % 3) % 32
    text = torch.where(torch.rand(text.shape) < 0.2, torch.randint(32, text.shape), text)  # the loss does not go to 0
    return {"x": text[:, :-1], "y": text[:, 1:]}


BAND = 0.03
"""Allowed distance of the mean loss of 30 steps, relative to bf16's."""


@pytest.mark.thorough
def test_300_steps_stay_within_a_band_of_bf16(small_layers: None) -> None:
    gpt = decoder_job(SMALL, global_batch=16)
    job: Job = replace(
        gpt,
        sample=rule,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        schedule=None,
    )
    low, small = (_means(losses(job, f"single,{word}", 300)) for word in ("bf16", "fp8"))
    assert low[-1] < 0.8 * low[0], "it learns"
    assert small != low
    assert small == pytest.approx(low, rel=BAND)


def _means(found: list[float]) -> list[float]:
    return [sum(found[start : start + 30]) / 30 for start in range(0, len(found), 30)]
