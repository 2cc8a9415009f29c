"""The reference: plain PyTorch, and our `single` against it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import tiny_jobs
from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.verify.evidence import Reference
from meshwright.verify.float64 import double_arithmetic, in_double
from meshwright.verify.plain_training import Recipe, seeded_batch, train_plainly
from meshwright.verify.references import LocalReferences
from meshwright.verify.verdict import Verdict

CPU = torch.device("cpu")


def of_single(job: Job, strategy: str = "single") -> Verdict:
    return LocalReferences(job, describe(job), CPU, steps=3, seed=0).verdict_on_process(Strategy.parse(strategy))


def test_the_loop_is_what_anybody_would_write() -> None:
    job = replace(tiny_jobs.convolutions, max_norm=0.1)
    torch.manual_seed(0)
    model = job.model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(2):
        batch = seeded_batch(job, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    trace = train_plainly(job, Recipe(steps=2, seed=0, device=CPU))
    assert trace.losses == pytest.approx(losses, rel=1e-6)
    for name, value in model.state_dict().items():
        assert torch.allclose(trace.last[name], value, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("job", ["transformer", "partial", "convolutions", "plain"])
def test_single_is_plain_pytorch(job: str) -> None:
    verdict = of_single(getattr(tiny_jobs, job))
    assert verdict.equal, verdict.first_difference
    assert verdict.precision == "float64" and verdict.grad_max_rel <= 1e-14


class Half(nn.Module):
    """Looks at its dtype, so it does not run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_jobs.Plain()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("fp32 only")
        return self.inner(x)


def test_a_model_that_does_not_run_in_float64_is_compared_in_fp32() -> None:
    verdict = of_single(replace(tiny_jobs.plain, model=Half))
    assert verdict.equal and verdict.precision == "fp32"
    assert "does not run in float64 (TypeError: fp32 only.)" in verdict.note


class Rounding(tiny_jobs.Plain):
    """Computes in fp32 where nobody can change it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y.type("torch.FloatTensor").tanh().type_as(y))


class Casting(tiny_jobs.Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).bfloat16().type_as(x))


class Norm(tiny_jobs.Plain):
    """Asks for fp32 as norms do."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second((y.float() * torch.rsqrt(y.to(torch.float32).square().mean(-1, keepdim=True))).type_as(y))


def test_what_rounds_to_less_than_float64_has_the_bounds_of_that() -> None:
    for model, word, least in ((Rounding, "fp32", 1e-5), (Casting, "bf16", 2.0**-7)):
        verdict = of_single(replace(tiny_jobs.plain, model=model))
        assert verdict.equal and verdict.precision == "float64" and verdict.bounds["loss_rel"] >= least
        assert f"rounds to {word} in places" in verdict.note
    assert of_single(replace(tiny_jobs.plain, model=Norm)).note is None


def test_a_job_that_fails_plainly_is_the_users_mistake() -> None:
    job = replace(tiny_jobs.plain, loss=lambda output, batch: (output.sum() / batch["absent"], 1))
    with pytest.raises(JobError, match=r"does not train in plain PyTorch, in one process .*: KeyError"):
        train_plainly(job, Recipe(steps=1, seed=0, device=CPU))


def test_float64_leaves_the_builders_numbers_as_they_are() -> None:
    model = in_double(tiny_jobs.transformer).model
    torch.manual_seed(0)
    plain = tiny_jobs.transformer.model()
    torch.manual_seed(0)
    doubled = model()
    assert all(torch.equal(a, b.float()) for a, b in zip(plain.parameters(), doubled.parameters(), strict=True))
    assert doubled.shift.dtype == doubled.waves.dtype == torch.float64
    with double_arithmetic():
        assert torch.ones(1).dtype == torch.ones(1, dtype=torch.float32).dtype == torch.ones(1).float().dtype
        assert torch.ones(1).dtype == torch.float64
    assert torch.ones(1).dtype == torch.float32


def test_a_reference_travels_through_a_file(tmp_path) -> None:
    here = LocalReferences(tiny_jobs.plain, describe(tiny_jobs.plain), CPU, steps=1, seed=0)
    made = here.of(Strategy.parse("single"))
    made.save(tmp_path / "reference.pt")
    read = Reference.load(tmp_path / "reference.pt")
    assert read.exact.losses == made.exact.losses and read.precision == "float64"
    assert torch.equal(read.exact.gradients["first.weight"], made.exact.gradients["first.weight"])
