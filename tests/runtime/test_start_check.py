"""A run that would start from other values than its builder's own is refused, by name."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.assemble.step import Trainer
from meshwright.errors import JobError
from meshwright.recording.tape import Tape
from meshwright.runtime.start_check import check_start
from minimal import WIDTH, make_job, make_trainer


class Scaled(nn.Module):
    """A layer and a tensor that only a function knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.rand(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.table


def test_a_sound_start_passes_and_leaves_no_trace() -> None:
    made = make_trainer(make_job(model=Scaled), "single,bf16")
    before, state = torch.get_rng_state(), {name: t.clone() for name, t in made.engine.state()}
    check_start(made)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[name], tensor) for name, tensor in made.engine.state())


def other_parameters(made: Trainer, patch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        made.engine.model.layer.bias += 1


def other_random_numbers(made: Trainer, patch: pytest.MonkeyPatch) -> None:
    """As a recording that loses what a buffer was made of."""
    play = Tape.play

    def from_another_seed(tape: Tape, hand_over: Callable[..., Any]) -> None:
        tape.seed += 1
        play(tape, hand_over)

    patch.setattr(Tape, "play", from_another_seed)


@pytest.mark.parametrize(("plant", "name"), [(other_parameters, "layer.bias"), (other_random_numbers, "layer.weight")])
def test_other_values_are_refused_by_name(
    plant: Callable[[Trainer, pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_trainer(make_job(model=Scaled))
    plant(made, monkeypatch)
    with pytest.raises(JobError, match=rf"{name} would start from .* alone give"):
        check_start(made)


def test_a_first_call_that_differs_is_refused() -> None:
    """The tensor stands where nobody looks: only the output shows it."""
    calls: list[int] = []
    recorded_in_the_check: list[int] = []

    class Hidden(Scaled):
        def __init__(self) -> None:
            super().__init__()
            calls.append(1)
            self.number = len(calls)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (self.number in recorded_in_the_check)

    made = make_trainer(make_job(model=Hidden))
    recorded_in_the_check.append(len(calls) + 2)  # the check builds plainly first
    with pytest.raises(JobError, match="first output would be"):
        check_start(made)


def test_a_builder_that_never_repeats_itself_is_not_blamed() -> None:
    numbers = itertools.count()

    def build() -> nn.Module:
        model = Scaled()
        model.layer.bias.data.fill_(float(next(numbers)))
        return model

    check_start(make_trainer(make_job(model=build)))
