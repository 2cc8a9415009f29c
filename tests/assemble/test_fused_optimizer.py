"""Which optimizers compute in one kernel, and that a step is the same."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from meshwright.assemble.optimizer import take_fused_kernels


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(5))]


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_step_is_the_same(kind: type[Adam]) -> None:
    by_loop, fused = (kind(parameters(), lr=1e-2) for _ in range(2))
    take_fused_kernels(fused)
    assert fused.param_groups[0]["fused"]
    for _ in range(3):
        for optimizer in (by_loop, fused):
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            optimizer.step()
    pairs = zip(by_loop.param_groups[0]["params"], fused.param_groups[0]["params"], strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


class Own(AdamW):
    """A user's own, which may do anything in its step."""


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW(parameters(), foreach=False),
        AdamW(parameters(), fused=False),
        AdamW(parameters(), differentiable=True),
        SGD(parameters()),
        Own(parameters()),
    ],
    ids=["foreach", "fused", "differentiable", "SGD", "subclass"],
)
def test_what_the_job_chose_stays(optimizer: Optimizer) -> None:
    before = [dict(group) for group in optimizer.param_groups]
    take_fused_kernels(optimizer)
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == [
        {k: v for k, v in group.items() if k != "params"} for group in before
    ]
