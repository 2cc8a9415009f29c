"""State that forward moves is found, and whether it moves by the samples."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.assemble.check import check
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import Place
from meshwright.strategies.moved_state import refuse_moved
from minimal import WIDTH, make_job


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Target(Base):
    """A copy that follows the layer by an average."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.layer.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        return self.layer(x) + self.target(x)


class Codebook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        with torch.no_grad():
            self.codes = self.codes.index_add(0, nearest, 0.1 * x)  # another tensor in its place
        return self.layer(x + self.codes[nearest])


class Counter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.passes += 1
        return self.layer(x) / (1 + self.calls)


class Cached(Base):
    """Fills in a table once, and notes its output."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=torch.float32)
        self.last = self.layer(x) + self.table
        return self.last


class ByHand(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


class Activated(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        return torch.relu(F.batch_norm(x, mean, variance, self.weight, self.bias, self.training, 0.1, self.eps))


def with_norm(norm: Any) -> Any:
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH))


def renormed() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, WIDTH, max_norm=0.01), nn.Flatten(), nn.Linear(2 * WIDTH, WIDTH))


def place(*, ranks: int) -> Place:
    return Place(device="cpu", devices=8, ranks=ranks, local_ranks=ranks)


def facts(model: Any, **parts: Any) -> ModelFacts:
    return describe(make_job(model=model, **parts))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Base, {}),
        (Cached, {}),
        (Target, {"target.weight": (True, False), "target.bias": (True, False)}),
        (Codebook, {"codes": (False, True)}),
        (Counter, {"calls": (False, False), "passes": (False, False)}),
        (with_norm(nn.BatchNorm1d), {}),
        (with_norm(Activated), {}),
        (with_norm(ByHand), {"1.running_mean": (False, True)}),
    ],
)
def test_what_forward_moves(model: Any, expected: dict[str, tuple[bool, bool]]) -> None:
    assert {state.name: (state.parameter, state.by_samples) for state in facts(model).moved} == expected


def test_power_iteration_and_renormed_rows() -> None:
    spectral = facts(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)))).moved
    assert {(state.name, state.by_samples) for state in spectral} >= {("0.weight_u", False)}
    parametrized = facts(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))).moved
    assert any(state.name.endswith("_u") and not state.by_samples for state in parametrized)
    words = {"sample": lambda n: {"x": torch.randint(9, (n, 2)), "y": torch.randn(n, WIDTH)}}
    assert [(state.name, state.by_samples) for state in facts(renormed, **words).moved] == [("0.weight", True)]


@pytest.mark.parametrize(
    ("model", "allowed", "refused"),
    [
        (Counter, ["ddp", "fsdp", "zero2", "op=2"], ["ddp,mb=1", "pp=2:gpipe"]),
        (Target, ["ddp", "zero1"], ["fsdp", "hsdp=1x2", "op=2", "ddp,mb=2", "zero1,bf16"]),
        (Codebook, ["single"], ["ddp", "zero1", "fsdp"]),
    ],
)
def test_where_moving_is_refused(model: Any, allowed: list[str], refused: list[str]) -> None:
    job, found = make_job(model=model), facts(model)
    for text in allowed:
        assert check(job, found, Strategy.parse(text), place(ranks=1 if text == "single" else 2))
    for text in refused:
        with pytest.raises(Refused, match=r"The model's forward changes .*(calls|passes|target|codes)"):
            check(job, found, Strategy.parse(text), place(ranks=2))


def test_recomputing_moves_twice() -> None:
    strategy, counter = Strategy.parse("ddp,ac=full").resolve(2), facts(Counter)
    assert refuse_moved(strategy, counter, 1) is None  # it is counted around the one block
    assert "ac=full" in str(refuse_moved(strategy, replace(counter, blocks=()), 1))
