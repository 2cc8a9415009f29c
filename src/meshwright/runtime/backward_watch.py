"""Complete a model's gradients at the end of every backward pass, whoever starts it.

A user's loop calls `loss.backward()`, so nothing of ours surrounds the pass. Hooks on the model's outputs and
parameters notice that a pass has reached the model, and autograd calls back when the pass has ended. Then gradients are
averaged over the ranks, before the loop can read, clip or apply them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from meshwright.assemble.precision import LossScale
from meshwright.strategies.engine import Engine
from meshwright.torch_private.autograd import at_end_of_backward, backward_id


class BackwardWatch:
    """Watches the backward passes of one model.

    Under fp16 the loss scale exists only inside the model: gradients are scaled up where they enter it at an output,
    and down where they leave it to a parameter or an input. So loss and gradients in the loop are never scaled.
    """

    def __init__(self, engine: Engine, loss_scale: LossScale | None) -> None:
        self._engine, self._loss_scale = engine, loss_scale
        self._pass = self.last_pass = -1
        """The backward pass that runs, and the last one that ended, by PyTorch's number."""
        self._samples = 0
        """Samples that went through the model in the current pass."""
        self._passes: list[int] = []
        """The same for each pass since gradients were reduced last."""
        self.reduces = engine.reduces(True)
        self.unreduced = 0
        """Backward passes whose gradients are not averaged over ranks yet."""
        self.began: Callable[[], None] = lambda: None
        """Called when a pass reaches the model, before any gradient is reduced."""
        self.ended: Callable[[list[int]], None] = lambda samples: None
        """Told at each reduction how many samples went through the model in each pass."""

    def hook_parameters(self) -> None:
        for leaf in self._engine.leaves():
            self._hook(leaf)

    @property
    def scale(self) -> float:
        return self._loss_scale.value if self._loss_scale else 1.0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.reduces = self._engine.reduces(False)
        try:
            yield
        finally:
            self.reduces = self._engine.reduces(True)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input of the model; the gradient that leaves the model through it is not scaled."""
        if self._loss_scale is None or not tensor.requires_grad:
            return tensor
        own = tensor.view_as(tensor)  # a hook on the tensor itself would change the gradients of its other uses, too
        own.register_hook(lambda gradient: gradient / self.scale)
        return own

    def leave(self, tensor: torch.Tensor, left: list[int], begins: Callable[[], None]) -> torch.Tensor:
        """An output of the model; the gradient that enters through it is scaled, and its pass is noticed.

        All outputs of a call share `left`, its number of samples, from which the first pass takes it.
        `begins` is called when a pass arrives, and may refuse it.
        """
        if not tensor.requires_grad:
            return tensor
        if self._loss_scale is not None or tensor.is_leaf:
            tensor = tensor.view_as(tensor)

        def on_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
            begins()
            self._arrived()
            self._samples += left.pop() if left else 0
            return gradient * self.scale if self._loss_scale is not None else None

        tensor.register_hook(on_gradient)
        return tensor

    def forget(self) -> None:
        """Forget passes that were not reduced."""
        self.unreduced, self._passes = 0, []

    def _hook(self, leaf: nn.Parameter) -> None:
        # A weak reference: Python's collector cannot see a parameter's hooks, so nothing would ever be freed.
        ref = weakref.ref(self)

        def arrived(parameter: torch.Tensor) -> None:
            if (watch := ref()) is not None:
                watch._arrived()

        def unscaled(gradient: torch.Tensor) -> torch.Tensor | None:
            watch = ref()
            return None if watch is None else gradient / watch.scale

        leaf.register_post_accumulate_grad_hook(arrived)
        if self._loss_scale is not None and not self._engine.averages_scaled:
            leaf.register_hook(unscaled)

    def _arrived(self) -> None:
        if backward_id() == self._pass:
            return
        self._pass, self._samples = backward_id(), 0  # an earlier pass may have failed
        self.began()
        self._engine.begin_backward()
        # In two steps, to come after FSDP2, which queues its own end of the pass after this.
        at_end_of_backward(lambda: at_end_of_backward(self._end))

    def _end(self) -> None:
        self._passes.append(self._samples)
        self.last_pass = self._pass
        self._samples, self._pass = 0, -1
        self._engine.end_backward(reduced=self.reduces, factor=1.0 / self.scale)
        self.unreduced = 0 if self.reduces else self.unreduced + 1
        if self.reduces:
            passes, self._passes = self._passes, []
            self.ended(passes)
