"""What optimizers take into account, and what schedules want, is found by trying them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Muon, RMSprop
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from meshwright.describe.model import describe
from meshwright.describe.optimizer import couplings
from meshwright.errors import JobError
from minimal import make_job, make_trainer, mlp
from optimizers_of_users import CountsUpdates, Lamb, LocalSums, NormedOverAll, adafactor, momentum

WHOLE = ("rows", "columns")


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (momentum, ()),
        (Adam, ()),
        (lambda params: AdamW(params, foreach=True), ()),
        (lambda params: AdamW(params, fused=True), ()),
        (lambda params: RMSprop(params, lr=1e-9), ()),
        (adafactor, WHOLE),
        (Lamb, WHOLE),
        (LocalSums, WHOLE),
        (NormedOverAll, (*WHOLE, "parameters")),
        (lambda params: Muon([p for p in params if p.dim() == 2]), WHOLE),
    ],
)
def test_what_an_optimizer_takes_into_account(optimizer: Any, expected: tuple[str, ...]) -> None:
    before = torch.random.get_rng_state()
    job = make_job(model=lambda: nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 4)), optimizer=optimizer)
    assert couplings(job, job.model()) == expected
    torch.random.set_rng_state(before)


def test_only_long_dims_are_factored() -> None:
    """An optimizer that couples only what is large couples a large model only."""

    class Factored(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in (p for p in self.param_groups[0]["params"] if p.grad is not None):
                long = parameter.dim() == 2 and min(parameter.shape) >= 64
                parameter.sub_(parameter.grad / (parameter.grad.norm() if long else 1.0), alpha=0.1)

    for width, expected in (64, WHOLE), (63, ()):
        job = make_job(model=lambda width=width: nn.Linear(width, width), optimizer=lambda params: Factored(params))
        assert couplings(job, job.model()) == expected


@pytest.mark.parametrize("optimizer", [LBFGS, lambda params: WantsClosure(params)])
def test_an_optimizer_that_wants_a_closure_is_refused(optimizer: Any) -> None:
    with pytest.raises(JobError, match=r"(LBFGS|WantsClosure)\.step\(\).*closure"):
        describe(make_job(optimizer=optimizer))


class WantsClosure(SGD):
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "sharpness-aware minimization requires a closure"


def plain_rates(schedule: Any, losses: list[float], feed: Any) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    made = schedule(optimizer)
    rates = []
    for number, loss in enumerate(losses, start=1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        feed(made, loss, number)
    return rates


@pytest.mark.parametrize(
    ("schedule", "feed"),
    [
        (lambda o: ReduceLROnPlateau(o, patience=0, threshold=1e9), lambda s, loss, n: s.step(loss)),
        (lambda o: LambdaLR(o, lambda n: 1 / (1 + n)), lambda s, loss, n: s.step()),
        (CountsUpdates, lambda s, loss, n: s.step_update(n)),
    ],
)
def test_schedules_get_what_their_step_wants(schedule: Any, feed: Any) -> None:
    trainer = make_trainer(make_job(schedule=schedule))
    results = [trainer.step(trainer.job.sample(8)) for _ in range(5)]
    expected = plain_rates(schedule, [result.loss for result in results], feed)
    assert [result.lr for result in results] == pytest.approx(expected)
    assert len(set(expected)) > 2


class WantsWeather:
    def step(self, weather: str) -> None: ...


def test_a_schedule_that_wants_something_else_is_refused() -> None:
    with pytest.raises(JobError, match=r"WantsWeather\.step\(weather"):
        describe(make_job(schedule=lambda optimizer: WantsWeather()))
    with pytest.raises(JobError, match="must give something with a step"):
        describe(make_job(schedule=lambda optimizer: object()))


def test_an_optimizer_without_a_rate() -> None:
    def factory(params: Any) -> SGD:
        optimizer = SGD(params, lr=0.1)
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
        for group in optimizer.param_groups:
            group["lr"] = None
        return optimizer

    trainer = make_trainer(make_job(optimizer=factory, model=mlp))
    assert trainer.step(trainer.job.sample(8)).lr == 0.0
