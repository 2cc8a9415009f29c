"""A fake world: one rank of many, with real memory and real compute."""

import gc
import weakref

import pytest
import torch

import tiny_jobs
from meshwright.assemble.check import check
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.runtime.measure import held_states
from meshwright.runtime.place import place_for
from meshwright.verify.plain_training import seeded_batch
from promised_states import promised_states


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "hsdp=2x4", "fsdp,bf16,ac=full"])
def test_one_rank_of_eight(strategy: str) -> None:
    job = tiny_jobs.transformer
    facts = describe(job)
    resolved = check(job, facts, Strategy.parse(strategy), place_for("cpu", 8))
    world = fake_world(8, torch.device("cpu"), rank=1)
    try:
        trainer = Trainer(job, facts, resolved, world, seed=0)
        trainer.step(seeded_batch(job, 0))
        trainer.forward_backward(seeded_batch(job, 1))
        held, promised = held_states(trainer), promised_states(facts, resolved)
    finally:
        world.leave()
    # Rank 0 has the most rows where they do not divide; Adam's step counters are not promised.
    assert held.memory["parameters"] <= promised["parameters"] * 1.001
    flags = 4 * len(facts.trainable)  # that travel, and stay, beside gradients: whether any rank has one
    assert held.memory["gradients"] <= promised["gradients"] * 1.001 + flags
    assert held.memory["optimizer"] <= promised["optimizer"] * 1.1


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2,bf16", "fsdp"])
def test_a_trainer_that_nobody_holds_is_freed(strategy: str) -> None:
    job = tiny_jobs.transformer
    facts = describe(job)
    resolved = check(job, facts, Strategy.parse(strategy), place_for("cpu", 8))
    world = fake_world(8, torch.device("cpu"), rank=1)
    try:
        trainer = Trainer(job, facts, resolved, world, seed=0)
        trainer.step(seeded_batch(job, 0))
        left = [weakref.ref(parameter) for parameter in trainer.engine.model.parameters()]
        del trainer
        gc.collect()
    finally:
        world.leave()
    assert left
    assert not [ref for ref in left if ref() is not None]
