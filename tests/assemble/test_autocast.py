"""`bf16:autocast` is a plain loop under `torch.autocast`, and nothing else."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from meshwright.api.job_planner import PlanOptions
from meshwright.api.plan import plan
from meshwright.assemble.autocast import AsOnCuda, autocast_region
from meshwright.assemble.check import check
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import Strategy
from meshwright.strategies import Place
from minimal import WIDTH, Blocks, make_job, make_trainer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Habits(Blocks):
    """Recomputes its end, keeps fp32 buffers, and normalises by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * self.scale)
        return checkpoint(self._end, x, use_reentrant=False)

    def _end(self, x: Tensor) -> Tensor:
        return F.linear(x.softmax(-1), self.leave.weight) + x


def plain_losses(dtype: torch.dtype, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    job = make_job(model=Habits)
    model, batch = Habits(), job.sample(8)
    optimizer = job.optimizer(model.parameters())
    found = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=dtype):
            total, weight = job.loss(model(batch["x"]), batch)
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((total / weight).item())
    return found, model.state_dict()


@pytest.mark.parametrize("policy", ["", ",ac=full", ",compile"])
def test_equals_a_plain_loop(policy: str) -> None:
    expected, weights = plain_losses(BF16)
    job = make_job(model=Habits)
    trainer = make_trainer(job, f"single,bf16:autocast{policy}")
    found = [trainer.step(job.sample(8)).loss for _ in range(3)]
    bound = 2e-3 if policy == ",compile" else 1e-6  # compiled kernels round less often
    assert found == pytest.approx(expected, rel=bound)
    for name, tensor in trainer.engine.state():
        assert tensor.dtype == FP32
        torch.testing.assert_close(tensor, weights[name], rtol=bound, atol=bound)


def test_fp16_scales_its_loss() -> None:
    expected, weights = plain_losses(FP16, steps=1)
    job = make_job(model=Habits)
    trainer = make_trainer(job, "single,fp16:autocast")
    trainer.loss_scale.value = 1024.0
    assert trainer.step(job.sample(8)).loss == pytest.approx(expected[0], rel=1e-6)
    for name, tensor in trainer.engine.state():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("text", ["tp=2,bf16:autocast", "op=2,fp16:autocast", "zero1,bf16:autocast,engine=deepspeed"])
def test_refused_by_name(text: str) -> None:
    job = make_job(model=Blocks)
    with pytest.raises(Refused, match=r"autocast .* use (bf16|fp16)"):
        check(job, describe(job), Strategy.parse(text), Place(device="cpu", devices=2, ranks=2, local_ranks=2))


def test_the_planner_says_that_it_does_not_rank_it() -> None:
    options = PlanOptions(strategies=("fsdp,bf16:autocast", "fsdp,bf16"), fast=True)
    ranking = plan(make_job(model=Blocks), Cluster.parse("2xH100-80GB"), options)
    (refused,) = ranking.refused
    assert refused.strategy == "fsdp,bf16:autocast" and "plan for bf16" in refused.reason
    assert [str(found.strategy) for found in ranking.plans] == ["fsdp=2,bf16"]


def test_no_region_without_autocast() -> None:
    assert autocast_region(Strategy.parse("ddp,bf16"), "cpu") is None


ON_CUDA: list[tuple[Any, torch.dtype]] = [
    (lambda t: F.linear(t(2, 4), t(3, 4), t(3)), BF16),
    (lambda t: t(2, 4) @ t(4, 3), BF16),
    (lambda t: nn.functional.layer_norm(t(2, 4).to(BF16), (4,), t(4), t(4)), FP32),
    (lambda t: F.interpolate(t(1, 2, 4).to(BF16), scale_factor=2), FP32),
    (lambda t: t(2, 4).to(BF16).softmax(-1), FP32),
    (lambda t: t(2, 4) + t(2, 4).to(BF16), FP32),
    (lambda t: F.gelu(t(2, 4).to(BF16)), BF16),
]


@pytest.mark.parametrize(("call", "dtype"), ON_CUDA)
def test_tensors_without_values_have_the_dtypes_of_cuda(call: Any, dtype: torch.dtype) -> None:
    """As the documentation lists them; a CPU's autocast has other lists."""
    with FakeTensorMode(), AsOnCuda(BF16):
        assert call(torch.rand).dtype == dtype
