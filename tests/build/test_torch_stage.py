"""What we take of PyTorch's pipelining beside its public parts: these fail when it changes."""

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, _backward

from meshwright.build import torch_stage
from meshwright.build.pipeline import PipelinePasses
from meshwright.build.step import Trainer
from meshwright.build.world import pretend
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.runtime.verify import seeded_batch
from pipeline_jobs import tied

VOTES_SINCE = (2, 12)


def test_private_methods_are_there() -> None:
    votes, others = torch_stage.PRIVATE[:2], torch_stage.PRIVATE[2:]
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert all(hasattr(PipelineStage, name) for name in others)
    assert all(hasattr(PipelineStage, name) for name in votes) == (release >= VOTES_SINCE)


@pytest.mark.parametrize("name", ["construct_reverse_graph", "get_param_groups", "_get_grad_fn_or_grad_acc"])
def test_private_functions_are_there(name: str) -> None:
    assert callable(getattr(_backward, name))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb", "zbv"])
def test_a_rank_of_a_fake_world_runs_and_notes_its_actions(schedule: str, rank: int) -> None:
    job = tied
    world = pretend(2, torch.device("cpu"), rank=rank)
    try:
        trainer = Trainer(job, describe(job), Strategy.parse(f"pp=2:{schedule}").resolve(2), world, seed=0)
        trainer.step(seeded_batch(job, 0))
        assert isinstance(trainer.passes, PipelinePasses)
        events = list(trainer.passes.events)
    finally:
        world.leave()
    forwards = [event.action for event in events if "F" in event.action]
    assert len(forwards) == len(set(forwards)) >= 2
    assert all(event.end >= event.start for event in events)
