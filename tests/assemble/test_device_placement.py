"""`layers=N` in one process. The CPU and the meta device are two devices on any machine."""

import pytest
import torch
from torch import nn

from meshwright.assemble.device_placement import FollowDevices, devices_for, place_parameters
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import record
from meshwright.strategies.pipeline.stages import cut_stages
from meshwright.verify.plain_training import seeded_batch
from pipeline_jobs import tied

CPU, META = torch.device("cpu"), torch.device("meta")


def test_steps_are_those_of_one_device() -> None:
    job = tied
    facts, world = describe(job), World(device=CPU)
    one = Trainer(job, facts, Strategy.parse("single"), world, seed=0)
    two = Trainer(job, facts, Strategy.parse("layers=2"), world, seed=0, devices=[CPU, CPU])
    for index in range(2):
        batch = seeded_batch(job, index)
        assert one.step(batch).loss == two.step(batch).loss


def test_parameters_lie_with_the_first_call_that_reads_them() -> None:
    job = tied
    facts, blueprint = describe(job), record(job.model, seed=0)
    stages = cut_stages(facts, 2)
    places = place_parameters(blueprint.model, facts, stages, [CPU, META])
    first, second = (facts.calls[start].name for start in stages.starts)
    assert {places[name] for name in places if name.startswith(f"{first}.")} == {CPU}
    assert {places[name] for name in places if name.startswith(f"{second}.")} == {META}
    blueprint.fill(places)
    assert all(p.device == places[name] for name, p in blueprint.model.named_parameters())


def test_tensors_of_two_devices_meet_on_the_later_one() -> None:
    here, there = torch.ones(3), torch.ones(3, device=META)
    with FollowDevices([CPU, META]):
        assert (here + there).device == META
        assert nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3, device=META)).device == META
    with FollowDevices([META, CPU]), pytest.raises(NotImplementedError):
        here + there  # nothing can be copied out of the meta device


def test_a_cpu_alone_is_refused_with_the_better_word() -> None:
    with pytest.raises(Refused, match="use --ranks 3"):
        devices_for(3, CPU)
