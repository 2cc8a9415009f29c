"""Notice which module of a model runs, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.assemble.rank_engine import RankEngine
from meshwright.assemble.step import Trainer
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.rehearsal import BACKWARD, FORWARD, Moment
from meshwright.facts.walk import LOSS
from meshwright.torch_private.autograd import backward_id
from meshwright.torch_private.trees import tree_leaves

Told = Callable[[Moment], None]


class ModuleHooks:
    """Calls `told` whenever a unit of the model begins or ends its forward, or begins its backward.

    A unit's backward begins when the gradient of its output arrives, and ends when that of another unit does. Compiled
    and graphed models get no hooks, which would be compiled or captured with them.
    """

    def __init__(self, trainer: Trainer, told: Told) -> None:
        self._told = told
        self._handles: list[RemovableHandle] = []
        if trainer.strategy.compile or trainer.strategy.graphs:
            return
        for model in models_of(trainer):
            self._attach(model, trainer.facts)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _attach(self, model: nn.Module, facts: ModelFacts) -> None:
        modules = dict(model.named_modules())
        for name in unit_names(facts):
            module = modules.get(name)
            if module is None or not any(True for _ in module.parameters()):
                continue
            # Before the hooks of data strategies, which gather a module's parameters; after those that free them.
            before = module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
            self._handles += [before, module.register_forward_hook(partial(self._leave, name))]

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._told(Moment(phase=current_pass(), module=name))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if current_pass() == BACKWARD:
            return  # it was recomputed
        self._told(Moment(phase=FORWARD))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: self._told(Moment(phase=BACKWARD, module=name)))
                return


def watched(job: Job, told: Told) -> Job:
    """The job with a loss that tells when it runs."""

    def loss(output: Any, batch: Any) -> Any:
        if not torch.compiler.is_compiling():
            told(Moment(phase=FORWARD, module=LOSS))
        return job.loss(output, batch)

    return replace(job, loss=loss)


def unit_names(facts: ModelFacts) -> list[str]:
    """The modules that a step is told by: those that the model calls one after another."""
    return list(dict.fromkeys(call.name for call in facts.calls)) or list(facts.blocks)


def models_of(trainer: Trainer) -> list[nn.Module]:
    """The models of all stages that the rank holds."""
    engine = trainer.engine
    return [one.model for one in (engine.engines if isinstance(engine, RankEngine) else [engine])]


def current_pass() -> str:
    return FORWARD if backward_id() == -1 else BACKWARD
