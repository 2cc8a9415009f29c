"""A model under a strategy in a loop that the user writes: what `Parallel` and the optimizer's hooks work on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.assemble.apply import PlacedEngine, make_whole
from meshwright.assemble.axes import Axes
from meshwright.assemble.error_context import naming_strategy
from meshwright.assemble.optimizer import HostCopies
from meshwright.assemble.precision import LossScale, raise_small
from meshwright.assemble.world import World
from meshwright.describe.dtypes import DTYPES
from meshwright.describe.structure import map_tensors, tensors_of, to_device
from meshwright.errors import JobError
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.dtensor import is_dtensor
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.runtime.backward_watch import BackwardWatch
from meshwright.runtime.gradient_checks import GradientChecks
from meshwright.runtime.layout_checks import LayoutChecks
from meshwright.runtime.loop_checks import LoopChecks, count_samples
from meshwright.runtime.loop_norm import Part, serve_clipping
from meshwright.runtime.loop_order import Event, LoopOrder
from meshwright.runtime.loop_overflow import OverflowGuard
from meshwright.runtime.loop_recompute import recompute_in
from meshwright.runtime.loop_saving import NoOptimizer, refuse_unsaved
from meshwright.runtime.loop_weights import LoopWeights
from meshwright.strategies.cuts import Cut
from meshwright.strategies.engine import Engine, OptimizerState
from meshwright.torch_private.modules import is_compiled, wrap_compiled_call


class OwnLoop:
    """One model of a user's loop, with what a checkpoint of it needs."""

    def __init__(
        self, engine: Engine, facts: ModelFacts, strategy: Strategy, axes: Axes, world: World, *, seed: int
    ) -> None:
        """All ranks must make one together."""
        self.engine, self.facts, self.strategy, self.axes, self.world = engine, facts, strategy, axes, world
        self.seed, self.steps = seed, 0
        self.loss_scale = LossScale() if strategy.number_format.scales_loss else None
        self._own = engine.parameters()
        self.host = HostCopies(self._own, axes.data_on_host()) if strategy.offload == "optimizer" else None
        self.optimized = self.host.parameters if self.host else self._own
        """The parameters that the user's optimizer gets: whole ones, shards or host copies."""
        self.optimizer: Optimizer | None = None
        self.updaters: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """All optimizers that were given or have updated the model."""
        self.schedule: Any = None
        self.ema = self.base = None
        self.loop: dict[str, Any] = {}
        self.step_was_skipped = False
        self.watch = BackwardWatch(engine, self.loss_scale)
        self.checks = LoopChecks(strategy, axes, world)
        # Stages come together in forward_backward alone, where the schedule's own messages are.
        self.order = LoopOrder(strategy, world, compares=axes.stages is None)
        self.watch.began = self.order.begin_pass
        self.watch.ended = self._reduced
        self._entered = self._waits = False
        """Whether a backward pass came by an output since the last step, or a call's output still waits for one."""
        self._frozen = [(name, p) for name, p in engine.model.named_parameters() if not p.requires_grad]
        self._overflow = OverflowGuard(self.loss_scale) if self.loss_scale is not None else None
        counted = engine.counted()
        named = zip(self.optimized.named(), self._own, strict=True)
        self._parts = {id(p): self._part(name, counted is None or id(own) in counted) for (name, p), own in named}
        self._seen = self._parameters_seen()
        self.weights = LoopWeights(engine, self.host, self._seen.values(), self.checks.on_any_data_rank)
        cut = {key for key, part in self._parts.items() if part.meshes}
        self.gradients = GradientChecks(strategy, axes, world, cut)
        self.layout = LayoutChecks(engine.model, self.optimized, engine.leaves(), strategy)
        self.order.calls_together = bool(axes.inner) or self.weights.are_copies or self.layout.swaps
        shards_on_all = any(_is_on_all_ranks(one, world) for one in engine.model.parameters())
        self.order.evaluates_together = shards_on_all or (bool(axes.inner) and axes.data_ranks == 1)
        self._updates, self.was_called = 0, False
        self.watch_calls()
        if axes.inner or axes.stages is not None or any(is_dtensor(parameter) for parameter in self.optimized):
            serve_clipping(self)

    def _parameters_seen(self) -> dict[str, nn.Parameter]:
        updated = dict(self.optimized.named())
        masters: dict[str, Any] = {held.name: held.tensor for held in self.engine.held()}
        named = self.engine.model.named_parameters()
        return {name: updated.get(name, masters.get(name, parameter)) for name, parameter in named}

    def watch_calls(self) -> None:
        """Watch the model's calls and backward passes."""
        self.watch.hook_parameters()
        model = self.engine.model
        if is_compiled(model):  # around the compiled call, because hooks and collectives would break its graph
            wrap_compiled_call(model, lambda call: lambda *args, **kwargs: self._around_compiled(call, args, kwargs))
        else:
            # First of all, because FSDP2 gathers the weights in such a hook, too.
            model.register_forward_pre_hook(self._before_call, prepend=True)
            wrap_forward(model, self._around)
        if self.strategy.number_format.is_low and not self.strategy.autocast:
            recompute_in(DTYPES[self.strategy.precision], self)

    @property
    def remembered(self) -> OptimizerState:
        return self.optimizer if self.optimizer is not None else NoOptimizer()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter as the user sees it: what the optimizer updates, and frozen ones."""
        yield from self._seen.items()

    def gradient_parts(self) -> Iterator[tuple[torch.Tensor, Part]]:
        for parameter in self.optimized:
            if parameter.grad is not None:
                yield parameter.grad, self._parts[id(parameter)]

    def _part(self, name: str, counts: bool) -> Part:
        """How a parameter's gradient counts in a norm."""
        cut, stages = self.engine.cut_of(name), self.axes.stages
        meshes = [cut.mesh] if isinstance(cut, Cut) else []
        return Part(tuple(meshes if stages is None else [*meshes, stages]), counts)

    def _around_compiled(self, call: Any, args: Any, kwargs: Any) -> Any:
        model = self.engine.model
        self.order.begin_call(trains=torch.is_grad_enabled() and model.training)
        return self._around(model, call, args, kwargs)

    def _before_call(self, model: nn.Module, args: Any) -> None:
        self.order.begin_call(trains=torch.is_grad_enabled() and model.training)
        if torch.is_grad_enabled():
            self.layout.before_call(called_before=self.was_called)
            self.weights.follow_changes()
        self.was_called = True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def global_mean(self, total: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
        """The mean loss over all data ranks, whose gradient, averaged over the ranks, is the mean's."""
        self.checks.weighted = True
        sums = torch.stack([total.detach().double(), torch.as_tensor(weight, device=total.device).detach().double()])
        summed = self.checks.sum_over_data(sums)
        own = total * (self.axes.data_ranks / summed[1]).to(total.dtype)
        return own + ((summed[0] / summed[1]).to(total.dtype) - own).detach()

    def _around(self, model: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the model's forward, on whatever way it was called."""
        differentiable = torch.is_grad_enabled()
        samples = 0
        if differentiable:
            self._refuse_unfrozen()
            self.weights.follow_changes()
            self.checks.before_call(model, args, kwargs)
            samples = count_samples(args, kwargs)
            if self.loss_scale is not None:
                args, kwargs = map_tensors(self.watch.enter, (args, kwargs))
        else:
            self.checks.before_evaluation(args, kwargs)
        with naming_strategy(self.strategy, model), ExitStack() as stack:
            stack.enter_context(self.engine.region())
            output = make_whole(forward(*args, **kwargs), self.axes)
            if isinstance(self.engine, PlacedEngine):
                output = to_device(output, self.world.device)
        if self.strategy.number_format.is_low:
            output = raise_small(output)
        if differentiable:
            self.layout.after_call()
        return self._watched(output, samples) if differentiable else output

    def _watched(self, output: Any, samples: int) -> Any:
        """The output, whose backward pass will be noticed."""
        first = next((tensor for tensor in tensors_of(output) if tensor.requires_grad), None)
        left, updates = [samples], self._updates
        self._waits = not self._entered

        def begins() -> None:
            self._entered, self._waits = True, False
            self._refuse_pass(updates)

        def leave(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is first:
                tensor = self.engine.attach_used_elsewhere(tensor)
            return self.watch.leave(tensor, left, begins)

        return map_tensors(leave, output)

    def _refuse_pass(self, updates: int) -> None:
        """Raise in a backward pass that would be wrong. `updates` is how many there were when the model was called."""
        copies = self.engine.updates_copies or any(map(is_dtensor, self._own))
        if copies and updates != self._updates:
            raise JobError(
                f"optimizer.step() was called between the model's call and its backward pass, which would use the new "
                f"weights under {self.strategy}; call the model again after the step."
            )
        if (self.axes.inner or self.layout.swaps) and torch.is_grad_enabled():
            raise JobError(
                f"A backward pass with create_graph=True went through the model, but {self.strategy} cannot "
                "differentiate its own backward pass; use ddp, zero1 or zero2."
            )

    def _refuse_unfrozen(self) -> None:
        if self.host is not None:
            for own, host in zip(self._own, self.optimized, strict=True):
                own.requires_grad_(host.requires_grad)
        self.engine.follow_requires_grad()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise JobError(
                    f"{name} was frozen when mw.parallelize laid the model out, and requires a gradient now, which "
                    f"would not be reduced under {self.strategy}; set requires_grad before mw.parallelize."
                )

    def no_sync(self) -> AbstractContextManager[None]:
        return self.watch.no_sync()

    def _reduced(self, samples: list[int]) -> None:
        self.order.reduced()
        self.weights.passed()
        self.checks.reduced(samples)
        if self.host is not None:
            self.host.add_gradients()
        self.gradients.reduced(self.optimized)

    def before_zero_grad(self) -> None:
        """Called before gradients are cleared."""
        if self.watch.unreduced and self._hides_gradients:
            raise JobError(
                f"zero_grad() was called after {self._passes} under no_sync(), whose gradients "
                f"{self.strategy} still holds for the next reduction; run the last micro-batch's backward outside of "
                "no_sync() first."
            )
        self.watch.forget()

    @property
    def _passes(self) -> str:
        return f"{self.watch.unreduced} backward pass{'es' * (self.watch.unreduced > 1)}"

    @property
    def _hides_gradients(self) -> bool:
        """Whether gradients that are not reduced yet are elsewhere than on the optimizer's parameters."""
        return self.host is not None or any(is_dtensor(parameter) for parameter in self._own)

    def before_step(self, parameters: list[nn.Parameter]) -> None:
        """Called before an optimizer updates these of the model's parameters. All ranks call it."""
        if self.watch.unreduced:
            raise JobError(
                f"optimizer.step() was called after {self._passes} under no_sync(), so its "
                "gradients are this rank's alone; run the last micro-batch's backward outside of no_sync()."
            )
        if self._waits and any(map(is_dtensor, parameters)):
            raise JobError(
                "optimizer.step() was called after the model, but no backward pass came by what the model returned, so "
                "its shards have no gradients. Compute the loss from the output: one that is kept as an attribute, or "
                "made in a hook, is not noticed. If there was no backward pass, leave the step out."
            )
        self._entered = self._waits = False
        self.order.announce(Event.STEP)
        self.checks.before_step()
        if self.gradients.is_due or self.loss_scale is not None:
            self.order.settle()
        self.gradients.before_step(parameters)
        self.step_was_skipped = self._overflow is not None and self._overflow.before_step(parameters)

    def after_step(self) -> None:
        """Called after an optimizer has updated some of the model's parameters. All ranks call it."""
        if self._overflow is not None:
            self._overflow.after_step()
        if self.step_was_skipped:
            self.weights.keep()
            return
        self._updates += 1
        if self.weights.are_copies:
            self.order.settle()  # here, because the message has been under way during the update
        self.weights.give()

    def before_norm(self) -> None:
        """Called before a norm is summed over ranks."""
        self.order.announce(Event.NORM)
        self.order.settle()

    def before_state(self) -> None:
        """Called before the whole state is read or written. All ranks call it; under ddp, some may."""
        if self.order.calls_together:
            self.order.announce(Event.STATE)
            self.order.settle()
        self.weights.follow_changes()

    def refuse_unsaved(self) -> None:
        """Raise if a checkpoint would lose the state of an optimizer."""
        refuse_unsaved(self.optimizer, self.updaters, self._seen.values())

    def put(self, state: dict[str, torch.Tensor]) -> None:
        """Load whole tensors by the unsplit model's names into what this rank holds. All ranks call it."""
        self.before_state()
        self.weights.put(state)

    @contextmanager
    def without_optimizer(self) -> Iterator[None]:
        """Context in which a checkpoint is of the weights alone."""
        before = self.optimizer, self.schedule
        self.optimizer = self.schedule = None
        try:
            yield
        finally:
            self.optimizer, self.schedule = before


def _is_on_all_ranks(parameter: Any, world: World) -> bool:
    """Whether a parameter's shards are divided over all ranks, so that all of them must gather it together."""
    if not is_dtensor(parameter):
        return False
    mesh = parameter.device_mesh
    return bool(mesh.ndim == 1 and mesh.size() == world.ranks)
