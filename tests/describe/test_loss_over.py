"""The experiment that finds what a loss is over."""

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.describe.loss_over import find_loss_over


def keeps_denormals() -> bool:
    return bool(torch.tensor(torch.finfo(torch.float32).tiny) / 2 > 0)


@pytest.mark.parametrize("kept", [True, False])
def test_denormal_numbers_count_as_zero_only_during_the_experiment(kept: bool) -> None:
    seen = []

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(keeps_denormals())
            return super().forward(x)

    job = mw.Job(
        model=lambda: Model(3, 1),
        loss=lambda output, batch: (output.square().sum(), len(batch)),
        inputs=lambda batch: (batch,),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, 3),
        global_batch=4,
    )
    torch.set_flush_denormal(not kept)
    try:
        assert find_loss_over(job, parameters=4).kind == "samples"
        assert keeps_denormals() is kept
    finally:
        torch.set_flush_denormal(False)
    assert seen and not any(seen)
