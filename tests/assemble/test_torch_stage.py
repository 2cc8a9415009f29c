"""A stage of a fake world runs every schedule and notes what it does."""

import pytest
import torch
from torch import nn

from meshwright.assemble.pipeline import PipelinePasses
from meshwright.assemble.step import Trainer
from meshwright.assemble.torch_stage import SafeSplitStage
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


@pytest.mark.parametrize("steady", [True, False])
def test_a_graph_that_changes_after_the_first_micro_batch_is_checked_again(steady: bool) -> None:
    """As under tp, whose blocks are recorded in their first calls: here, a weight is later read in two places."""
    layer, x = nn.Linear(2, 2), torch.randn(3, 2, requires_grad=True)
    stage = object.__new__(SafeSplitStage)  # a real one needs ranks
    stage.stage_index, stage.num_stages, stage.submod = 0, 2, layer
    stage.splits, stage.steady = None, steady
    stage.fwd_cache = {0: ([layer(x)], [x]), 1: ([layer(layer(x))], [x])}
    assert stage._can_split(0, None)
    assert stage._can_split(1, None) is steady
