"""Stages one after another in one process give the output and the gradients of the whole model."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeline_jobs
from meshwright.build.hollow import Hollow
from meshwright.describe.blueprint import record
from meshwright.describe.flow import Flow, Watcher
from meshwright.describe.model import describe
from meshwright.describe.observe import call_loss, call_model, trace
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.strategies.stages import Crossings, Stages, cut_stages, find_crossings, held_parameters

CPU = torch.device("cpu")
SEED = 3


@dataclass
class Cut:
    """A job's model, cut."""

    job: Job
    stages: Stages
    flow: Flow
    crossings: Crossings
    held: list[frozenset[str]]

    def hollow(self, stage: int) -> Hollow:
        blueprint = record(self.job.model, SEED)
        made = Hollow(blueprint.model, self.stages, stage, CPU)
        made.give_up(self.held[stage], torch.float32)
        made.watch_calls(self.flow)
        blueprint.fill(CPU)
        return made

    def run(self, hollow: Hollow, batch: Any, received: tuple[Tensor, ...]) -> Any:
        return hollow.run(self.flow, self.crossings, received, lambda: loss_of(self.job, hollow.model, batch))


def cut(job: Job, count: int, batch: Any) -> Cut:
    facts = describe(job)
    stages = cut_stages(facts, count, job.stages)
    pristine = record(job.model, SEED)
    flow, _ = trace(job, pristine, Watcher([call.name for call in facts.calls]), batch)
    assert flow is not None
    crossings = find_crossings(flow, stages)
    return Cut(job, stages, flow, crossings, held_parameters(pristine.model, flow, stages, crossings))


def loss_of(job: Job, model: nn.Module, batch: Any) -> Tensor:
    return call_loss(job, call_model(job, model, batch), batch)[0]


def whole_model(job: Job) -> nn.Module:
    torch.manual_seed(SEED)
    return job.model()


def made_up(job: Job) -> Any:
    torch.manual_seed(0)
    assert job.sample is not None
    return job.sample(3)


def gradients(model: nn.Module, sums: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad


def run_by_hand(job: Job, count: int, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and gradients by name, summed over the stages that hold a parameter."""
    parts = cut(job, count, batch)
    hollows = [parts.hollow(stage) for stage in range(count)]
    arrived: list[tuple[Tensor, ...]] = [()]
    sent: list[tuple[Tensor, ...]] = []
    for hollow in hollows:
        output = parts.run(hollow, batch, arrived[-1])
        sent.append(output if isinstance(output, tuple) else (output,))
        arrived.append(tuple(tensor.detach().requires_grad_() for tensor in sent[-1]))
    ((loss,), backward) = sent[-1], sent[:-1]
    loss.backward()
    for tensors, copies in reversed(list(zip(backward, arrived[1:], strict=False))):
        pairs = [(t, c.grad) for t, c in zip(tensors, copies, strict=True) if t.requires_grad and c.grad is not None]
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    sums: dict[str, Tensor] = {}
    for hollow in hollows:
        gradients(hollow.model, sums)
    return loss.detach(), sums


JOBS = {
    "tied": "a tied head, a parameter of the model's own, keyword inputs, a mask made between the calls",
    "glued": "parameters read between the calls",
    "trunk": "nothing special",
    "biased": "blocks that return tuples, and hand on the first one's bias",
    "skipping": "a value that passes through stages that do not read it",
    "repeating": "a block on the first and on the last stage",
    "translating": "an encoder's output that every decoder block reads",
    "frozen": "parameters that do not train",
    "frozen_foot": "stages that do not train",
    "listening": "a value that is read but not learned through",
    "sharing": "a value that blocks find on an object they share",
    "doubling": "one tensor returned in two places",
}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", JOBS)
def test_stages_are_the_whole(name: str, count: int) -> None:
    job: Job = getattr(pipeline_jobs, name)
    batch, model = made_up(job), whole_model(job)
    expected = loss_of(job, model, batch)
    expected.backward()
    wanted: dict[str, Tensor] = {}
    gradients(model, wanted)
    loss, found = run_by_hand(job, count, batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0.0)
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6, msg=parameter)
