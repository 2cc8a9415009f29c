"""What a user asks `parallelize` for, as a job that can be described."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from meshwright.describe.structure import map_tensors, tensors_of
from meshwright.errors import JobError, Refused
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.strategy import Strategy
from meshwright.runtime.loop_optimizer import MakeOptimizer, rebuilt
from meshwright.strategies import inner_axis
from meshwright.strategies.model_axis import InnerAxis

Build = Callable[[], nn.Module]
Loss = Callable[[Any, Any], tuple[torch.Tensor, float | torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class LoopRequest:
    """What a user asked `parallelize` for."""

    model: Build | nn.Module
    strategy: Strategy
    optimizer: Optimizer | MakeOptimizer | None
    sample: Any
    inputs: Callable[[Any], Any]
    loss: Loss | None
    global_batch: int | None
    seed: int
    blocks: Sequence[str] | None
    tensor_plan: Mapping[str, str] | None
    stages: Sequence[str] | None

    def refuse_unsuited(self) -> None:
        """Refuse what a user's loop cannot run, before any rank is joined."""
        strategy = self.strategy
        if strategy.engine != "torch":
            raise Refused(f"{strategy}: engine={strategy.engine} runs the optimizer itself; use mw.setup(job, ...).")
        if strategy.micro_batch is not None and strategy.stage_axis is None:
            raise Refused(
                f"{strategy}: mb={strategy.micro_batch} divides batches in our loop, but in yours you do; leave it "
                "out, and call backward for each part of a batch, all but the last under model.no_sync()."
            )
        for term in strategy.inner_axes:
            if type(inner_axis(term)).finish is not InnerAxis.finish:
                raise Refused(f"{strategy}: {term.word} completes gradients once per step; use mw.setup(job, ...).")
            if term.traits.shares_gradients:
                raise Refused(
                    f"{strategy}: {term.word} divides samples over ranks, whose gradients must be summed, but those of "
                    "a loop that you write are averaged; use mw.setup(job, ...), or tp."
                )
        if inside := [term.word for term in strategy.axes if term.traits.splits_batch]:
            raise Refused(f"{strategy}: {inside[0]} sums some gradients over fewer ranks; use mw.setup(job, ...).")
        if strategy.stage_axis is not None and strategy.offload == "optimizer":
            raise Refused(f"{strategy}: offload=optimizer with stages needs our loop; use mw.setup(job, ...).")
        if strategy.stage_axis is not None and not strategy.stage_axis.traits.one_process:
            self.refuse_unknown_loss()
        if strategy.axes and self.sample is None:
            raise JobError(
                f"{strategy} divides the model by what one call of it shows; give mw.parallelize an example of a "
                "batch, sample=..., and inputs=... if the model takes only a part of it."
            )

    def refuse_unknown_loss(self) -> None:
        if self.loss is None:
            raise JobError(
                f"{self.strategy} computes the loss in its last stage, so mw.parallelize must know it: give loss=..., "
                "a function from (output, batch) to (sum, weight)."
            )

    def parameters_before(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Names and parameters of a model that exists already, by identity."""
        if not isinstance(self.model, nn.Module):
            return {}
        return {id(parameter): (name, parameter) for name, parameter in self.model.named_parameters()}

    def job(self, ranks: int) -> Job:
        """The loop as a job: enough to describe the model."""
        model, optimizer = self.model, self.optimizer
        if isinstance(optimizer, Optimizer):
            optimizer = rebuilt(optimizer, {key: name for key, (name, _) in self.parameters_before().items()})
        samples = _count(self.sample)
        return Job(
            model=(lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model,
            inputs=self.inputs,
            loss=self.loss or _sum_of_outputs,
            optimizer=optimizer or plain_sgd,
            global_batch=self.global_batch or max(samples, ranks),
            loss_over="samples",
            sample=self.sample if callable(self.sample) else lambda number: _samples(self.sample, number),
            blocks=self.blocks,
            tensor_plan=self.tensor_plan,
            stages=self.stages,
        )


def as_arguments(batch: Any) -> Any:
    return batch if isinstance(batch, tuple | list | Mapping) else (batch,)


def plain_sgd(parameters: NamedParameters) -> Optimizer:
    return SGD(parameters, lr=0.1)


def _sum_of_outputs(output: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """A loss that depends on every output, for describing a model whose loss is in the user's loop."""
    floating = [tensor.float().square().sum() for tensor in tensors_of(output) if tensor.requires_grad]
    if not floating:
        raise JobError("No output of the model depends on a trainable parameter.")
    return torch.stack(floating).sum(), 1.0


def _count(batch: Any) -> int:
    if batch is None or callable(batch):
        return 1
    return next((int(tensor.shape[0]) for tensor in tensors_of(batch) if tensor.dim()), 1)


def _samples(batch: Any, number: int) -> Any:
    """A batch of so many samples, which repeats those of an example."""
    length = _count(batch)

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        has_samples = tensor.dim() > 0 and tensor.shape[0] == length
        return tensor[torch.arange(number) % length] if has_samples else tensor

    return map_tensors(repeat, batch)
