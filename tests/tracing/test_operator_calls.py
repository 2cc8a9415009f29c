"""The operators of a traced step are those that plain PyTorch runs, with the same layouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tiny_jobs
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.tracing.operator_calls import BLOCKS, FunctionCalls, StepCalls, step_calls


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.cells = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.cells(self.token(x))[0])


recurrent = Job(
    model=Recurrent,
    inputs=lambda batch: (batch["x"],),
    loss=lambda output, batch: (output.sum(), len(output)),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    sample=lambda n: {"x": torch.randint(11, (n, 5))},
    global_batch=4,
)
JOBS = {"transformer": tiny_jobs.transformer, "convolutions": tiny_jobs.convolutions, "recurrent": recurrent}


def calls_of(job: Job, text: str = "single", ranks: int = 1, device: str = "cpu") -> StepCalls:
    return step_calls(job, describe(job), Strategy.parse(text).resolve(ranks), ranks=ranks, device=device)


def plain_signatures(job: Job) -> dict[str, int]:
    """What forward and backward of plain PyTorch run, on real tensors."""
    assert job.sample is not None
    model, batch = job.model(), {name: x.contiguous() for name, x in job.sample(job.global_batch).items()}
    inputs = job.inputs(batch)
    with FunctionCalls() as calls:
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        total, _ = job.loss(output, batch)
        total.backward()
    return {signature: call.count for signature, call in calls.collector.calls.items()}


@pytest.mark.parametrize("name", JOBS)
def test_a_step_on_a_cpu_runs_what_plain_pytorch_runs(name: str) -> None:
    traced = {call.signature: call for call in calls_of(JOBS[name]).calls}
    # A loss is divided by its weight here, so its first gradient is another one.
    missing = {
        signature: count
        for signature, count in plain_signatures(JOBS[name]).items()
        if signature not in traced and not signature.startswith(("aten.ones_like", "aten.detach", "aten.empty"))
    }
    # Workspaces of recurrent layers have no size on fake tensors.
    assert {s for s in missing if "uint8" not in s} == set()


def test_phases_and_elements_are_counted() -> None:
    found = calls_of(tiny_jobs.convolutions)
    phases = {phase for call in found.calls for phase in call.counts}
    assert phases == {"forward", "backward", "update"}
    assert found.elements == sum(p.numel() for p in tiny_jobs.convolutions.model().parameters())


def test_on_cuda_attention_is_a_fused_kernel_and_updates_take_lists() -> None:
    names = {call.run.name for call in calls_of(tiny_jobs.transformer, "single,bf16", device="cuda").calls}
    assert "_scaled_dot_product_flash_attention" in names
    assert "_scaled_dot_product_flash_attention_backward" in names
    assert any(name.startswith("_foreach") for name in names)


def test_sharded_elements_are_those_of_the_rank() -> None:
    found = calls_of(tiny_jobs.transformer, "fsdp", ranks=2)
    whole = sum(p.numel() for p in tiny_jobs.transformer.model().parameters())
    assert 0.4 * whole < found.elements < 0.7 * whole


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(tiny_jobs.Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_deep_model_is_traced_with_few_blocks() -> None:
    def job(layers: int) -> Job:
        return replace(
            tiny_jobs.plain,
            model=lambda: Deep(layers),
            loss=lambda output, batch: (output.sum(), len(output)),
            sample=lambda n: {"x": torch.randn(n, 4, tiny_jobs.WIDTH)},
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )

    deep, short = calls_of(job(BLOCKS + 5)), calls_of(job(BLOCKS))
    assert {c.signature for c in deep.calls} == {c.signature for c in short.calls}
    assert deep.elements == short.elements
