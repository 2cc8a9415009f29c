"""`parallelize`: a model laid out under a strategy for a training loop that the user writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from meshwright.assemble.apply import RankSetup, lay_out
from meshwright.assemble.axes import lay_axes
from meshwright.assemble.check import check_strategy
from meshwright.assemble.operator_dtypes import recomputing
from meshwright.assemble.precision import raise_small
from meshwright.assemble.world import World
from meshwright.describe.blocks import find_blocks
from meshwright.describe.dtypes import DTYPES
from meshwright.describe.model import batch_norm_names, parameter_facts
from meshwright.describe.structure import tensors_of
from meshwright.errors import JobError, Refused
from meshwright.facts.job import NamedParameters
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import adopt, record
from meshwright.runtime.place import place_of
from meshwright.runtime.run import enter_world
from meshwright.strategies.norm import global_norm, scale_


class Parallel:
    """The laid-out model that `parallelize` returns. Call it like the model; a loss is a mean over this rank's samples.

    A loop calls `parallel.backward(loss)`, `optimizer.step()`, `parallel.updated()`. A call that would leave gradients
    or parameters incomplete, such as a plain `loss.backward()`, is an error.
    """

    def __init__(self, engine: Any, strategy: Strategy, world: World) -> None:
        self._engine, self.strategy, self.world = engine, strategy, world
        self.device = world.device
        self.data_ranks = 1 if strategy.traits.many_devices else strategy.data_ranks
        self.data_rank = world.rank
        self._lowered = strategy.number_format.is_low
        self._recomputing = nullcontext() if strategy.autocast else recomputing(DTYPES[strategy.precision])
        self._in_backward = False
        self._has_gradients = False
        """Whether gradients are reduced over all ranks and wait for the optimizer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_gradients and torch.is_grad_enabled():
            raise JobError(
                "The model was called after parallel.backward(loss) without parallel.updated(); call it after every "
                "optimizer.step(). Before the last of several micro-batches, give backward and micro_batch last=False."
            )
        output = self._engine(*args, **kwargs)
        output = raise_small(output) if self._lowered else output
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(self._check_backward)
        return output

    def _check_backward(self, gradient: torch.Tensor) -> None:
        if not self._in_backward:
            raise JobError(
                f"loss.backward() was called on the output of a model under {self.strategy}, whose gradients would not "
                "be those of all ranks; call parallel.backward(loss) instead."
            )

    def parameters(self) -> NamedParameters:
        """The parameters to give to the optimizer: this rank's parameters or its shards of them."""
        return self._engine.parameters()  # type: ignore[no-any-return]

    def micro_batch(self, *, last: bool = True) -> AbstractContextManager[Any]:
        """Context for forward and backward of one micro-batch; every rank must run as many of them.

        Sharded gradients are reduced in each, unless the strategy says `sync=last`; others in the last one only.
        """
        return self._engine.accumulating(last)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Run backward of this rank's mean loss; after the last one, gradients are averaged over the ranks."""
        self._in_backward = True
        try:
            with self._recomputing:
                (loss * (self._engine.gradient_scale / self.data_ranks)).backward()
        finally:
            self._in_backward = False
        if last:
            self._engine.finish()
            self._has_gradients = True

    def clip_(self, max_norm: float) -> torch.Tensor:
        """Clip gradients by their global norm, and return that norm."""
        self._refuse_unfinished("clip_(max_norm)")
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = global_norm(gradients)
        scale_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def updated(self) -> None:
        """Fetch what other ranks updated, and drop the gradients. Call it after `optimizer.step()`."""
        self._refuse_unfinished("updated()")
        self._has_gradients = False
        self._engine.updated()
        for parameter in self._engine.parameters():
            parameter.grad = None
        self._engine.forget_gradients()

    def _refuse_unfinished(self, call: str) -> None:
        if not self._has_gradients:
            raise JobError(
                f"parallel.{call} was called before gradients were reduced over the ranks; call "
                "parallel.backward(loss) first, with last=True for the last micro-batch."
            )

    def state(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer as one process would hold it. All ranks must call it."""
        return {name: tensor.detach().cpu() for name, tensor in self._engine.state()}

    def close(self) -> None:
        """Leave the process group."""
        self.world.leave()


def parallelize(
    model: Callable[[], nn.Module] | nn.Module,
    strategy: Strategy | str,
    *,
    seed: int = 0,
    device: str | None = None,
    blocks: list[str] | None = None,
) -> Parallel:
    """Lay a model out over the launched ranks. Prefer a builder to a model: each rank then holds only its part, and
    the weights depend only on the seed."""
    chosen = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    if chosen.micro_batch is not None or chosen.offload == "optimizer" or chosen.number_format.scales_loss:
        raise Refused(f"{chosen}: mb, offload=optimizer and fp16 need our loop; use mw.setup(job, ...).")
    if chosen.engine != "torch":
        raise Refused(
            f"{chosen}: engine={chosen.engine} runs the optimizer, so it needs our loop; use mw.setup(job, ...)."
        )
    if chosen.model_ranks > 1:
        raise Refused(f"{chosen}: tp, op, pp and layers need our loop; use mw.setup(job, ...).")
    world = enter_world(device)
    blueprint = None if isinstance(model, nn.Module) else record(model, seed, values=world.has_weights)
    structure = blueprint.model if blueprint else model
    assert isinstance(structure, nn.Module)
    facts = ModelFacts(
        parameters=parameter_facts(structure, None),
        blocks=find_blocks(structure, hint=blocks),
        batch_norms=batch_norm_names(structure),
        unseen="no step was run on fake tensors",
    )
    resolved = check_strategy(facts, chosen, place_of(world, chosen))
    # Only after all checks: adopting a model takes its weights away until it is laid out.
    blueprint = blueprint or adopt(structure)
    setup = RankSetup(facts=facts, strategy=resolved, axes=lay_axes(resolved, world), world=world)
    engine, _ = lay_out(blueprint, setup)
    return Parallel(engine, resolved, world)
