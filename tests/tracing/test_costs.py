"""What units of a model keep for backward."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.describe.model import describe
from meshwright.facts.costs import ModelCosts, Peak, Size
from meshwright.tracing.costs import measure_costs

WIDTH, TOKENS = 16, 64


class Block(nn.Module):
    """Attention that also returns weights, which `weigh` makes of its scores."""

    def __init__(self, weigh: Any) -> None:
        super().__init__()
        self.ask, self.answer, self.weigh = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), weigh

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.ask(x) @ x.transpose(1, 2)
        return self.answer(scores.softmax(dim=-1) @ x) + x, self.weigh(scores)


class Model(nn.Module):
    def __init__(self, weigh: Any, collects: bool) -> None:
        super().__init__()
        self.blocks, self.collects = nn.ModuleList(Block(weigh) for _ in range(4)), collects

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block in self.blocks:
            outputs = block(x)
            x = outputs[0]
            if self.collects:
                found.append(outputs[1])
        return x.mean() + sum(weights.mean() for weights in found)


def kept(block: int, weigh: Any, collects: bool = False) -> float:
    """Bytes that a block keeps for one sample."""
    job = mw.Job(
        model=lambda: Model(weigh, collects),
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output, len(batch)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, TOKENS, WIDTH),
        global_batch=4,
    )
    costs = measure_costs(job, describe(job), "fp32")
    return next(unit for unit in costs.units if unit.name == f"blocks.{block}").kept.each


@pytest.mark.parametrize("block", [0, 1])
def test_what_a_block_returns_and_nobody_takes_is_not_kept(block: int) -> None:
    weights = TOKENS * TOKENS * 4
    usual = kept(block, lambda scores: scores.detach().mean())
    assert kept(block, lambda scores: scores * 2) == pytest.approx(usual, abs=1024)
    assert kept(block, lambda scores: scores * 2, collects=True) == pytest.approx(usual + weights, abs=1024)


class Rounds(nn.Module):
    """A loop over one layer. Each round keeps its input and one number per element, except for the last."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.layers, self.rounds = nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), rounds

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(self.rounds):
            state = state + torch.tanh(self.layers[0](state))
        return state.mean()


class Shared(nn.Module):
    """Attention whose bias the first block makes and the others pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias, _ = block(x, bias)
        return x.mean()


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.answer, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        scores = x @ x.transpose(1, 2)
        bias = torch.zeros_like(scores) + self.bias if bias is None else bias
        weights = (scores + bias).softmax(dim=-1)
        return self.answer(weights @ x) + x, bias, weights


def _costs(build: Any) -> ModelCosts:
    job = mw.Job(
        model=build,
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output * len(batch), len(batch)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, TOKENS, WIDTH),
        global_batch=4,
    )
    return measure_costs(job, describe(job), "fp32")


def test_every_round_of_a_loop_keeps_its_own() -> None:
    """A module's calls were all told as its last one, after which a loop frees its state."""
    few, many = (sum(unit.kept.each for unit in _costs(lambda n=n: Rounds(n)).units) for n in (3, 9))
    tensor = TOKENS * WIDTH * 4
    assert (many - few) / 6 == pytest.approx(2 * tensor, rel=0.05)  # the layer's input, and what tanh keeps


def test_a_bias_that_blocks_pass_on_is_kept_once() -> None:
    """What a block that recomputes keeps: not the bias that it was given, and not weights that nobody takes."""
    hidden, scores = TOKENS * WIDTH * 4, TOKENS * TOKENS * 4
    costs = _costs(Shared).recomputed("full")
    found = [unit.kept.each for unit in costs.units if unit.is_block]
    assert found[0] == hidden + scores
    assert set(found[1:]) == {hidden}
    assert ModelCosts.from_json(costs.to_json()) == costs


class Slope(nn.Module):
    """Returns the slope of what equal blocks compute, which is trained."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        height = place
        for block in self.blocks:
            height = block(height)
        (slope,) = torch.autograd.grad(height.sum(), place, create_graph=True)
        return slope.square().mean()


def test_gradients_in_the_forward_pass_go_through_every_block() -> None:
    """Equal blocks are skipped otherwise, and what their gradients compute and keep would be missing."""
    costs = {depth: _costs(lambda depth=depth: Slope(depth)) for depth in (3, 6)}
    product = 2 * 4 * TOKENS * WIDTH * WIDTH
    assert costs[6].flops(4) == 6 * 6 * product  # output and slope of each block, and two gradients of either
    tensor = TOKENS * WIDTH * 4
    last = {depth: found.units[-1] for depth, found in costs.items()}  # where the slope is taken
    assert (last[6].kept.each - last[3].kept.each) / 3 >= 2 * tensor
    assert (last[6].backward_peak.at(4) - last[3].backward_peak.at(4)) / 4 / 3 >= 2 * tensor


class TwoMoments(nn.Module):
    """With few samples its fullest moment is a large product of weights, with many one of its own."""

    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(size, size))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = (self.weights @ self.weights).detach().exp().mean()
        return self.second(x.detach().repeat(1, 8, 1).exp().mean(1) * scale)


def _two_moments(size: int, batch: int) -> ModelCosts:
    job = mw.Job(
        model=lambda: TwoMoments(size),
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output.sum(), len(batch)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, TOKENS, WIDTH),
        global_batch=batch,
    )
    costs = measure_costs(job, describe(job), "fp32")
    assert ModelCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs
    return costs


EACH = 2 * 8 * TOKENS * WIDTH * 4
"""Bytes of a sample at the second moment: what is repeated, and its exponentials."""


def test_the_fullest_moment_may_be_another_one_with_many_samples() -> None:
    peak = next(unit for unit in _two_moments(256, 4).units if unit.name == "first").forward_peak
    assert isinstance(peak, Peak) and isinstance(peak.many, Size)
    assert peak.few.each < 0.1 * peak.many.each
    assert peak.at(256) == pytest.approx(256 * EACH, rel=0.1)


def test_many_is_as_many_as_the_job_takes_if_samples_are_small() -> None:
    peak = next(unit for unit in _two_moments(2048, 4096).units if unit.name == "first").forward_peak
    assert peak.at(64) > 2 * 64 * EACH  # the product of weights
    assert peak.at(4096) == pytest.approx(4096 * EACH, rel=0.15)
