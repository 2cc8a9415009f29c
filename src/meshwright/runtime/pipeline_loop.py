"""A pipeline in a user's loop: the loop clips, steps and saves, and the schedule runs forward and backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import nn

from meshwright.assemble.step import Trainer
from meshwright.errors import JobError
from meshwright.runtime.own_loop import OwnLoop


class PipelineLoop(OwnLoop):
    """A model of which this rank runs some stages."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        super().__init__(
            trainer.engine, trainer.facts, trainer.strategy, trainer.axes, trainer.world, seed=trainer.seed
        )
        trainer.loss_scale = self.loss_scale

    def watch_calls(self) -> None:
        """The schedule completes gradients after many backward passes."""

    def _parameters_seen(self) -> dict[str, nn.Parameter]:
        return dict(self.optimized.named())

    def call(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise JobError(
            f"The model was called under {self.strategy}, where no rank has its output: the stages run forward and "
            "backward of many micro-batches together. Call model.forward_backward(batch) and model.evaluate(batches)."
        )

    def no_sync(self) -> AbstractContextManager[None]:
        raise JobError(
            f"no_sync() was called under {self.strategy}, whose schedule accumulates micro-batches itself; call "
            "model.forward_backward(batch) with the whole batch."
        )
