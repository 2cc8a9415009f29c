"""A stage of a fake world runs every schedule and notes what it does."""

import pytest
import torch

from meshwright.assemble.pipeline import PipelinePasses
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.verify.plain_training import seeded_batch
from pipeline_jobs import tied


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb", "zbv"])
def test_a_rank_of_a_fake_world_runs_and_notes_its_actions(schedule: str, rank: int) -> None:
    job = tied
    world = fake_world(2, torch.device("cpu"), rank=rank)
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
