"""Recurrent layers and CTC losses on fake tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Job
from meshwright.describe.as_on_cuda import steps_at_once
from meshwright.describe.model import describe
from meshwright.describe.pass_tensors import fake_mode

FRAMES, LETTERS, WIDTH = 40, 5, 8


class Recognizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, WIDTH, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, LETTERS)

    def forward(self, sound: Tensor) -> Tensor:
        return self.head(self.recurrent(sound)[0])


def job() -> Job:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        letters = output.log_softmax(dim=-1).transpose(0, 1)
        return F.ctc_loss(letters, batch["y"], batch["frames"], batch["letters"], reduction="sum"), len(output)

    return Job(
        model=Recognizer,
        inputs=lambda batch: (batch["x"],),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: {
            "x": torch.randn(count, FRAMES, 4),
            "y": torch.randint(1, LETTERS, (count, 6)),
            "frames": torch.full((count,), FRAMES),
            "letters": torch.full((count,), 6),
        },
        global_batch=2,
    )


def test_a_recurrent_model_with_a_ctc_loss_is_described() -> None:
    facts = describe(job())
    assert not facts.unseen
    assert all(parameter.used for parameter in facts.parameters)
    products = sum(p.numel() for p in Recognizer().recurrent.parameters() if p.dim() == 2) * FRAMES * 2
    (recurrent,) = (call for call in facts.calls if call.name == "recurrent")
    assert recurrent.flops % products == 0 and recurrent.flops > 0


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_loss_of_fake_tensors_has_the_shapes_of_the_real_one(reduction: str) -> None:
    def run() -> tuple[torch.Size, torch.Size]:
        letters = torch.randn(FRAMES, 3, LETTERS).requires_grad_()
        given = torch.ones(3, 6, dtype=torch.long), torch.full((3,), FRAMES), torch.full((3,), 6)
        loss = F.ctc_loss(letters.log_softmax(-1), *given, reduction=reduction)
        loss.sum().backward()
        assert letters.grad is not None
        return loss.shape, letters.grad.shape

    real = run()
    with fake_mode(), steps_at_once():
        assert run() == real


def test_real_tensors_are_computed_as_ever() -> None:
    torch.manual_seed(0)
    model, sound = Recognizer(), torch.randn(2, FRAMES, 4)
    expected = model(sound)
    with steps_at_once():
        assert torch.equal(model(sound), expected)
