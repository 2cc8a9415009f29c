"""What a rank holds of examples/gpt.py under the model's axes, against an even share. Every rank of a fake world."""

from pathlib import Path

import pytest
import torch

from meshwright.assemble.step import Trainer
from meshwright.assemble.world import fake_world
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job

JOB = load_job(str(Path(__file__).parents[2] / "examples" / "gpt.py"))
EMBEDDINGS = ("token.", "position.")


@pytest.mark.parametrize(("text", "ranks"), [("tp=2", 2), ("pp=2:1f1b", 2), ("tp=2,pp=2:1f1b", 4)])
def test_a_rank_holds_its_share(text: str, ranks: int) -> None:
    """Within a tenth; the embeddings aside also with two axes. They lie on the first stage, and tied on the last."""
    facts = describe(JOB)
    blocks = sum(p.count for p in facts.parameters if not p.name.startswith(EMBEDDINGS)) / ranks
    whole = sum(p.count for p in facts.parameters) / ranks
    for rank in range(ranks):
        world = fake_world(ranks, torch.device("cpu"), rank=rank)
        try:
            trainer = Trainer(JOB, facts, Strategy.parse(text).resolve(ranks), world, seed=0)
            held = {name: parameter.numel() for name, parameter in trainer.engine.parameters().named()}
        finally:
            world.leave()
        inner = sum(count for name, count in held.items() if not name.startswith(EMBEDDINGS))
        print(f"{text} rank {rank}: {sum(held.values()) / whole:.4f} of an even share, blocks {inner / blocks:.4f}")
        assert inner == pytest.approx(blocks, rel=0.1)
        assert sum(held.values()) <= 1.11 * whole
