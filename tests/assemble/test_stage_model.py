"""Stages one after another in one process give the output and the gradients of the whole model."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import awkward_pipeline_models
import pipeline_jobs
import pipeline_models
from meshwright.assemble.stage_model import StageModel
from meshwright.describe.calls import Flow
from meshwright.describe.flow import Watcher
from meshwright.describe.model import describe
from meshwright.describe.observe import call_loss, call_model, trace
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.recording.blueprint import record
from meshwright.strategies.pipeline.stages import Crossings, Stages, cut_stages, find_crossings, held_parameters

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

    def stage_model(self, stage: int) -> StageModel:
        blueprint = record(self.job.model, SEED)
        made = StageModel(blueprint.model, self.stages, stage, CPU)
        made.give_up(self.held[stage], torch.float32)
        made.watch_calls(self.flow)
        blueprint.fill(CPU)
        return made

    def run(self, stage_model: StageModel, batch: Any, received: tuple[Tensor, ...]) -> Any:
        return stage_model.run(self.flow, self.crossings, received, lambda: loss_of(self.job, stage_model.model, batch))


@cache
def facts_of(job: Job) -> ModelFacts:
    return describe(job)


def cut(job: Job, count: int, batch: Any) -> Cut:
    facts = facts_of(job)
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
    hollows = [parts.stage_model(stage) for stage in range(count)]
    arrived: list[tuple[Tensor, ...]] = [()]
    sent: list[tuple[Tensor, ...]] = []
    for stage_model in hollows:
        output = parts.run(stage_model, batch, arrived[-1])
        sent.append(output if isinstance(output, tuple) else (output,))
        arrived.append(tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in sent[-1]))
    ((loss,), backward) = sent[-1], sent[:-1]
    loss.backward()
    for tensors, copies in reversed(list(zip(backward, arrived[1:], strict=False))):
        pairs = [(t, c.grad) for t, c in zip(tensors, copies, strict=True) if t.requires_grad and c.grad is not None]
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    sums: dict[str, Tensor] = {}
    for stage_model in hollows:
        gradients(stage_model.model, sums)
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
    "collecting": "values that are written into parts of a tensor",
    "handing": "a parameter that is returned as it is",
    "routing": "whole numbers that cross",
    "doubling": "one tensor returned in two places",
    "changing_glue": "outputs that are changed in place between the calls",
    "changing_first": "blocks that change their input in place",
    "reading_changed": "inputs that blocks have changed, read after that",
    "changing_past": "changes in place that autograd does not see",
}


@pytest.mark.parametrize("count", [2, 4])
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


class Fickle(pipeline_models.Trunk):
    """Calls its blocks in an order that depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = list(self.blocks) if len(x) > 2 else list(reversed(self.blocks))
        x = self.enter(x)
        for block in blocks:
            x = block(x)
        return self.leave(x)


def test_another_order_of_calls() -> None:
    job = replace(pipeline_jobs.trunk, model=Fickle)
    batch = made_up(job)
    parts = cut(job, 2, batch)
    first = parts.stage_model(0)
    parts.run(first, batch, ())
    small = {name: tensor[:2] for name, tensor in batch.items()}
    with pytest.raises(JobError, match=r"calls blocks\.3, but it called blocks\.0 here before.*same order"):
        parts.run(first, small, ())
    with pytest.raises(JobError, match="same order"):
        parts.run(parts.stage_model(1), small, tuple(torch.zeros(2, 4, 8) for _ in parts.crossings.values[1]))
    assert len(parts.run(first, batch, ())) == len(parts.crossings.values[1]), "a failed pass leaves nothing behind"


def test_a_branch_that_was_not_seen_and_reads_what_was_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    job = pipeline_jobs.by_value
    batch = made_up(job)
    parts = cut(job, 2, batch)
    received = tuple(tensor.detach() for tensor in parts.run(parts.stage_model(0), batch, ()))
    assert parts.run(parts.stage_model(1), batch, received).isfinite()
    monkeypatch.setattr(awkward_pipeline_models.ByValue, "limit", -float("inf"))
    assert parts.run(parts.stage_model(1), batch, received).isnan(), "no other training goes on without an error"


def test_more_calls_than_before() -> None:
    class Longer(pipeline_models.Trunk):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if len(x) > 1 else self.leave(y[..., : pipeline_models.WIDTH])

    job = replace(pipeline_jobs.trunk, model=Longer)
    batch = made_up(job)
    parts = cut(job, 2, batch)
    small = {name: tensor[:1] for name, tensor in batch.items()}
    with pytest.raises(JobError, match="calls leave, but it called nothing here before"):
        parts.run(parts.stage_model(1), small, tuple(torch.zeros(1, 4, 8) for _ in parts.crossings.values[1]))


def test_a_model_called_outside_of_a_pass_runs_whole_calls() -> None:
    """Only passes of the stage are hollow."""
    job = pipeline_jobs.trunk
    batch = made_up(job)
    stage_model = cut(job, 2, batch).stage_model(0)
    x = torch.randn(2, 4, 8)
    assert torch.equal(stage_model.model.blocks[0](x), whole_model(job).blocks[0](x))


def test_parameters_that_were_given_up_take_no_memory() -> None:
    job = pipeline_jobs.tied
    parts = cut(job, 2, made_up(job))
    whole = whole_model(job)
    first, last = (parts.stage_model(stage).model for stage in range(2))
    for model, held in zip((first, last), parts.held, strict=True):
        assert {name for name, _ in model.named_parameters()} == held
    shared = [parameter for name, parameter in whole.named_parameters() if name in parts.held[0] & parts.held[1]]
    assert held_bytes(first) + held_bytes(last) == held_bytes(whole) + sum(4 * p.numel() for p in shared)
    assert max(held_bytes(first), held_bytes(last)) < 0.6 * held_bytes(whole)
    gone = first.blocks[3].up.weight
    assert not isinstance(gone, nn.Parameter)
    assert gone.shape == whole.blocks[3].up.weight.shape
    assert gone.untyped_storage().nbytes() == 4
    assert first.head.weight is first.token.weight, "tied parameters stay tied"
    assert last.head.weight is last.token.weight


def held_bytes(model: nn.Module) -> int:
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


def test_stand_ins_take_no_memory() -> None:
    job = pipeline_jobs.trunk
    batch = made_up(job)
    parts = cut(job, 2, batch)
    last = parts.stage_model(1)
    seen: list[Tensor] = []
    last.model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output))
    parts.run(last, batch, tuple(torch.zeros(3, 4, 8) for _ in parts.crossings.values[1]))
    assert [(tensor.shape, tensor.untyped_storage().nbytes()) for tensor in seen] == [((3, 4, 8), 4)]


def test_a_stage_leaves_as_soon_as_it_is_done() -> None:
    """Nothing behind its own calls runs, and no handler of the author's keeps it."""

    class Stubborn(pipeline_models.Trunk):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                try:
                    x = block(x)
                except Exception:
                    x = x * 0
            after.append(1)
            return self.leave(x)

    after: list[int] = []
    job = replace(pipeline_jobs.trunk, model=Stubborn)
    batch = made_up(job)
    parts = cut(job, 2, batch)
    after.clear()
    sent = parts.run(parts.stage_model(0), batch, ())
    assert not after
    parts.run(parts.stage_model(1), batch, sent)
    assert after
