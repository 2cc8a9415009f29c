"""A data strategy in one file, as docs/design.md says, and what ranks do with it in tests/test_extension.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import nn

import tiny_jobs
from checkpoint_programs import Arrival, Setup, go_on, train_and_save_twice
from meshwright.assemble.world import World
from meshwright.facts.data_axis import DataTraits
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import DataStrategy, ModelAxis, Place, register, unregister
from meshwright.strategies.engine import ApplyContext, Engine
from meshwright.verify.verdict import Verdict
from meshwright.verify.verify import verify


class SummedEngine(Engine):
    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(model)
        self._group = group

    def finish(self) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self._group)


class Summed(DataStrategy):
    summary = "a whole copy on every rank, each gradient summed by itself after the last backward pass"
    traits = DataTraits(word="summed", complexity=6)
    overlaps = False

    def refuse(self, strategy: Strategy, facts: ModelFacts, place: Place) -> str | None:
        if facts.unused:
            return f"summed waits for the gradient of {facts.unused[0]}, which the model does not use; use ddp."
        return None

    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        context.fill()
        assert context.mesh is not None
        return SummedEngine(model, context.mesh.get_group())


class InOneProcess(DataStrategy):
    """As `dp`, but on CPUs: one process that is handed all devices."""

    summary = "one process with several devices, of which it uses the first"
    traits = DataTraits(word="in-one-process", one_process=True, complexity=6)
    overlaps = False

    def axes(self, strategy: Strategy) -> dict[str, int]:
        return {}

    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        assert context.devices == (0, 1)
        context.fill()
        return Engine(model)


@contextmanager
def registered(technique: DataStrategy | ModelAxis) -> Iterator[None]:
    register(technique)
    try:
        yield
    finally:
        unregister(technique.traits.word)


def verdicts(world: World, facts: ModelFacts) -> list[Verdict]:
    with registered(Summed()), registered(InOneProcess()):
        asked = ["summed", "summed,mb=1", "in-one-process"]
        return list(verify(tiny_jobs.transformer, facts, asked, world, steps=2))


def move(world: World, facts: ModelFacts, source: str, target: str, folder: str) -> Arrival:
    half, whole = (str(Path(folder, name)) for name in ("half", "whole"))
    with registered(Summed()):
        train_and_save_twice(world, Setup("transformer", facts, source), half, whole)
        return go_on(world, Setup("transformer", facts, target), [half], whole, folder)[0]
