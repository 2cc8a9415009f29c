"""Find the module in which a step's loss or gradient stopped being finite, by running that step's batch again.

Nothing is watched before a loss or a gradient is seen to be infinite or NaN; then hooks look at what each module takes
and gives, in forward order, and at the gradients of what it gave, in backward order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.assemble.step import Trainer
from meshwright.describe.structure import tensors_of
from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.engine import OptimizingEngine


@dataclass(frozen=True, kw_only=True, order=True)
class Origin:
    """Where numbers stopped being finite on one rank. Sorts by how well it is known."""

    certainty: int
    """0: finite numbers went in; 1: numbers that were not finite already came in from other ranks."""
    backward: bool
    words: str


def find_origin(trainer: Trainer, batch: Any) -> tuple[int, str]:
    """The rank and the place, in words, in which the batch's numbers stop being finite; the words may be empty.

    All ranks call it, with the weights with which the batch was run before. It leaves gradients behind.
    """
    watch = _Watch()
    steps, trainer.steps = trainer.steps, trainer.steps - 1  # dropout is drawn by step
    try:
        with watch.around(trainer.engine.model):
            trainer.forward_backward(batch)
        trainer.take_totals()
    finally:
        trainer.steps = steps
    own = watch.origin(trainer.engine.model, batch)
    found = [(origin, rank) for rank, origin in enumerate(trainer.world.gather(own)) if origin is not None]
    if not found:
        return 0, ""
    origin, rank = min(found)
    return rank, origin.words


def why_not_searched(trainer: Trainer) -> str:
    """Why the module cannot be found under this strategy; empty if it can."""
    if isinstance(trainer.engine, OptimizingEngine):
        return "engine=deepspeed has made its update already"
    if trainer.strategy.compile or trainer.strategy.graphs:
        return "compiled code has no modules; run without compile and graphs to find the first one"
    if not trainer.holds_back:
        return "the update is made already; run with --check-finite to find the first module"
    return ""


@dataclass
class _Watch:
    """What modules took and gave in one pass."""

    forward: list[tuple[str, bool, bool]] = field(default_factory=list)
    """Module, whether its inputs were finite, whether its outputs were; in the order in which modules ended."""
    backward: list[tuple[str, bool]] = field(default_factory=list)
    """Module, whether the gradient of its output was finite; in the order of the backward pass."""

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        handles = [
            module.register_forward_hook(partial(self._ended, name or "the model"))
            for name, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _ended(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self.forward.append((name, _finite(inputs), _finite(output)))
        for tensor in tensors_of(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._arrived, name))

    def _arrived(self, name: str, gradient: torch.Tensor) -> None:
        self.backward.append((name, _finite(gradient)))

    def origin(self, model: nn.Module, batch: Any) -> Origin | None:
        """The first place on this rank; None if all is finite here."""
        if not _finite(batch):
            return Origin(certainty=0, backward=False, words="in its batch, before the model runs")
        weights = [name for name, parameter in model.named_parameters() if not _finite(parameter.detach())]
        if weights:
            return Origin(certainty=0, backward=False, words=f"in the weights themselves, first {weights[0]}")
        return self._in_forward() or self._in_backward(model)

    def _in_forward(self) -> Origin | None:
        for name, taken, given in self.forward:
            if taken and not given:
                return Origin(certainty=0, backward=False, words=f"in the forward pass of {name}")
            if not taken:
                words = f"before {name}, whose input is not finite"
                return Origin(certainty=1, backward=False, words=words)
        return None

    def _in_backward(self, model: nn.Module) -> Origin | None:
        """The module that got a finite gradient and passed on one that is not."""
        last = "the loss"
        for name, finite in self.backward:
            if not finite:
                return Origin(certainty=0, backward=True, words=f"in the backward pass of {last}")
            last = name
        spoilt = [name for name, parameter in model.named_parameters() if not _finite(parameter.grad)]
        if spoilt:
            return Origin(certainty=0, backward=True, words=f"in the gradient of {spoilt[0]}")
        return None


def _finite(values: Any) -> bool:
    """Whether all floating-point numbers in a structure of tensors are finite."""
    return all(bool(torch.isfinite(_local(one)).all()) for one in tensors_of(values) if one.is_floating_point())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor
