"""Changes of a laid-out model's modules and parameters that its layout would not follow."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.errors import JobError
from meshwright.facts.job import NamedParameters
from meshwright.facts.strategy import Strategy
from meshwright.recording.dtensor import is_dtensor
from meshwright.torch_private.tensors import gradient_hooks, storage_id

FIRST_CALLS = 5
EVERY = 20
"""The first training calls are checked, and then one of so many: it walks over all modules."""


class LayoutChecks:
    """Compares a model with what it was when it was laid out."""

    def __init__(
        self, model: nn.Module, optimized: NamedParameters, leaves: Iterable[nn.Parameter], strategy: Strategy
    ) -> None:
        self._model, self._optimized, self._strategy = model, optimized, strategy
        self._modules = dict(model.named_modules())
        self._parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
        self.swaps = any(map(is_dtensor, model.parameters()))
        """Whether FSDP2 gives the modules other parameters for the time of a call."""
        accumulated = {id(leaf) for leaf in leaves}
        self._silent = {n: _hooks(p) for n, p in optimized.named() if id(p) not in accumulated}
        """How many hooks the parameters have on which autograd runs none."""
        self._memory: dict[str, int] = {}
        self._calls = 0

    def before_call(self, *, called_before: bool) -> None:
        """Raise if the model was changed in a way that its layout does not follow."""
        self._calls += 1
        if self._calls > FIRST_CALLS and self._calls % EVERY:
            return
        self._refuse_replaced_modules()
        if not self.swaps or not called_before:
            self._refuse_replaced_parameters()
        self._refuse_replaced_memory()
        self._refuse_silent_hooks()

    def after_call(self) -> None:
        if not self._memory:
            shards = ((name, p) for name, p in self._optimized.named() if is_dtensor(p))
            self._memory = {name: _memory(parameter) for name, parameter in shards}

    def _refuse_replaced_modules(self) -> None:
        now = dict(self._model.named_modules())
        for name in [*now, *self._modules]:
            if now.get(name) is not self._modules.get(name):
                self._refuse(f"The module {name}", "build the model as it shall be")

    def _refuse_replaced_parameters(self) -> None:
        for name, parameter in self._model.named_parameters():
            if self._parameters.get(name) != id(parameter):
                self._refuse(f"The parameter {name}", "change its values in place, or replace it")

    def _refuse_replaced_memory(self) -> None:
        for name, parameter in self._optimized.named():
            if name in self._memory and _memory(parameter) != self._memory[name]:
                self._refuse(f"The data of {name}", "change it in place (p.data.copy_(...)), or set it")

    def _refuse(self, what: str, instead: str) -> None:
        raise JobError(
            f"{what} was replaced after mw.parallelize laid the model out under {self._strategy}, which would not "
            f"train the new one; {instead} before mw.parallelize."
        )

    def _refuse_silent_hooks(self) -> None:
        for name, parameter in self._optimized.named():
            if name in self._silent and _hooks(parameter) != self._silent[name]:
                raise JobError(
                    f"A hook is registered on {name}, which {self._strategy} gives its gradient without running hooks; "
                    "change p.grad after backward instead, or use ddp."
                )


def _hooks(parameter: nn.Parameter) -> int:
    return sum(len(hooks) for hooks in gradient_hooks(parameter) if hooks)


def _memory(parameter: torch.Tensor) -> int:
    # Of the DTensor itself: `p.data = ...` replaces its storage, which is empty, and not that of its shard.
    return storage_id(parameter.untyped_storage())
