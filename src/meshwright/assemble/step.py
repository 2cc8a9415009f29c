"""One optimizer step over a global batch: split, forward and backward, normalise, clip, update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any

import torch

from meshwright.assemble.apply import RankSetup
from meshwright.assemble.axes import lay_axes
from meshwright.assemble.batch import Batch, Share, part
from meshwright.assemble.build_passes import build_passes
from meshwright.assemble.device_placement import Devices
from meshwright.assemble.ema import Ema
from meshwright.assemble.error_context import naming_optimizer, naming_strategy
from meshwright.assemble.gradient_hook import apply_hook, refuse_hook
from meshwright.assemble.graphs import GraphedPasses
from meshwright.assemble.low_copies import LowCopies
from meshwright.assemble.metrics import MetricSums
from meshwright.assemble.optimizer import HostCopies, one_mesh_per_group, refuse_coupled_shards, take_fused_kernels
from meshwright.assemble.passes import Dropout
from meshwright.assemble.precision import LossScale
from meshwright.assemble.step_result import StepResult, Totals
from meshwright.assemble.world import World, outside_of_modes
from meshwright.describe.dtypes import DTYPES
from meshwright.describe.samples import Cutter
from meshwright.errors import JobError
from meshwright.facts.evaluation import LOSS, Metric
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.lr_schedule import EPOCH, EVALUATION, STEP, advance
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.engine import OptimizerState, OptimizingEngine
from meshwright.strategies.norm import scale_
from meshwright.strategies.pipeline.sizes import count_micro_batches


class Trainer:
    """A job under a strategy, with its optimizer: everything that a step needs."""

    def __init__(
        self,
        job: Job,
        facts: ModelFacts,
        strategy: Strategy,
        world: World,
        *,
        seed: int,
        devices: Devices | None = None,
        engine_config: Mapping[str, Any] | None = None,
    ) -> None:
        """`devices` are those of `layers=N` in one process; None takes the GPUs and then the CPU.

        `engine_config` is the user's DeepSpeed configuration.
        """
        self.job, self.facts, self.strategy, self.world, self.seed = job, facts, strategy, world, seed
        self.axes = lay_axes(strategy, world)
        self.cutter = Cutter(job)
        setup = RankSetup(facts=facts, strategy=strategy, axes=self.axes, world=world, engine_config=engine_config)
        with naming_strategy(strategy):
            self.passes = build_passes(job, setup, self.share, self.cutter, seed=seed, devices=devices)
        self.engine = self.passes.engine
        self.engine.model.train()
        self._low = LowCopies(self.engine.model, DTYPES[strategy.precision])
        self._own = self.engine.parameters()
        on_host = strategy.offload == "optimizer" and not isinstance(self.engine, OptimizingEngine)
        self.host = HostCopies(self._own, self.axes.data_on_host()) if on_host else None
        self.optimized = self.host.parameters if self.host else self._own
        """The masters that this rank's optimizer updates, by name."""
        _keep_attributes(self.optimized, self.engine.model)
        if not world.fake:  # collectives transfer nothing there
            refuse_coupled_shards(job, facts.couplings, self._own, strategy)
            if job.on_gradient is not None:
                refuse_hook(job.on_gradient, self._own, self.engine, strategy, world)
        self.optimizer = take_fused_kernels(job.optimizer(self.optimized or _nothing_to_update()))
        self.remembered: OptimizerState = self.optimizer
        """The optimizer's state of each of them."""
        if isinstance(self.engine, OptimizingEngine):
            self.engine.adopt(self.optimizer, job.max_norm)
            self.optimized, self.remembered = self.engine.optimized(), self.engine.remembered()
        self.ema = None if job.ema is None else Ema(job.ema, self.optimized)
        self.schedule = job.schedule(self.optimizer) if job.schedule else None
        self.loss_scale = LossScale() if strategy.number_format.scales_loss else None
        self.steps = 0
        self.base: Mapping[str, str] | None = None
        """Fingerprints of the frozen parameters, if a checkpoint leaves them out."""
        self.loop: dict[str, Any] = {}
        """What the training loop keeps in checkpoints: small values that are the same on all ranks."""
        self.wish_to_stop = False
        """Set before a step. It is sent to all ranks with the step's loss and returned as the result's `stop`."""
        self.holds_back = False
        """Whether a gradient that is not finite is not applied: a step that is searched for the cause needs the weights
        with which it ran. Reads the norm, for which the host waits for a GPU."""
        self._is_stale = False
        """Whether masters changed, and what the model computes with has not followed yet."""
        self._pending: tuple[Totals, Batch, float] | None = None

    @property
    def share(self) -> Share:
        axes, pipelined = self.axes, self.axes.stages is not None
        return Share(
            ranks=axes.data_ranks,
            rank=axes.data_rank,
            micro_batch=None if pipelined else self.strategy.micro_batch,
            pipelined=count_micro_batches(self.strategy, self.job.global_batch) if pipelined else None,
        )

    def step(self, batch: Any) -> StepResult:
        """Take one optimizer step. A `Batch` is this rank's part; anything else is the whole global batch."""
        self.forward_backward(batch)
        return self.update()

    def forward_backward(self, batch: Any) -> None:
        """Compute the gradient of the global batch's mean loss (under fp16, times the loss scale)."""
        self._refresh()
        own = self._part(batch)
        expected = self.facts.weight_per_sample if own.regular else None
        # A weight that depends on the data is not known yet: divide by the samples now and correct that below.
        divisor = own.samples * (expected if expected is not None else 1.0)
        copies = nullcontext() if isinstance(self.passes, GraphedPasses) else self._low.shared(len(own.pieces))
        with naming_strategy(self.strategy, self.engine.model), copies:
            totals = self.passes.backward(own, self._scale_up() / divisor, self.steps)
        if self.wish_to_stop:
            totals[2] = 1.0
        sums = Totals(
            local=totals[0].clone(),
            summed=totals,
            work=self.world.start_sum(totals),
            known_weight=divisor if expected is not None else None,
        )
        if expected is None and not isinstance(self.engine, OptimizingEngine):
            scale_(self._gradients(), divisor / sums.weight)
        self._pending = sums, replace(own, rounds=(), whole=None), divisor

    def take_totals(self) -> Totals:
        """The loss of the last `forward_backward`, for a loop that makes the update itself."""
        if self._pending is None:
            raise JobError("take_totals() was called without a forward_backward(batch) before it.")
        (totals, _, _), self._pending = self._pending, None
        return totals

    def update(self) -> StepResult:
        """Clip by the global norm, and step the optimizer and its schedule."""
        if self._pending is None:
            raise JobError("update() was called without a forward_backward(batch) before it.")
        (totals, batch, divisor), self._pending = self._pending, None
        lr = float(self.optimizer.param_groups[0].get("lr") or 0.0)  # some optimizers choose it themselves
        if isinstance(self.engine, OptimizingEngine):
            known = totals.known_weight is not None
            norm, finite = self.engine.update(self._scale_down() * (1.0 if known else divisor / totals.weight))
        else:
            norm, finite = self._clip_and_apply()
        if self.loss_scale:
            self.loss_scale.after(finite)
        if finite and self.ema is not None:
            self.ema.update()
        self._advance_schedule(totals, batch.ends_epoch, updated=finite)
        for parameter in self._own:
            parameter.grad = None
        self.engine.forget_gradients()
        self.steps += 1
        return StepResult(
            step=self.steps,
            samples=batch.samples,
            lr=lr,
            totals=totals,
            norm_tensor=norm,
            skipped=not finite,
            ends_epoch=batch.ends_epoch,
        )

    def _advance_schedule(self, totals: Totals, epochs: int | None, *, updated: bool) -> None:
        if self.schedule is None:
            return
        if self.job.schedule_by == STEP and updated:
            advance(self.schedule, updates=self.steps + 1, loss=lambda: float(totals.mean))
        elif self.job.schedule_by == EPOCH and epochs is not None:
            advance(self.schedule, updates=epochs, loss=lambda: float(totals.mean))

    def evaluated(self, loss: float, evaluations: int) -> None:
        """Step a schedule that follows evaluations."""
        if self.schedule is not None and self.job.schedule_by == EVALUATION:
            advance(self.schedule, updates=evaluations, loss=lambda: loss)

    def evaluate(self, batches: Iterable[Any]) -> float:
        return self.measure(batches, {})[LOSS]

    @torch.no_grad()
    def measure(
        self, batches: Iterable[Any], metrics: Mapping[str, Metric], *, averaged: bool = False
    ) -> dict[str, float]:
        """The mean loss and the metrics over batches, with the averaged weights if `averaged`.

        All ranks call it with the same number of batches.
        """
        sums, totals = MetricSums(metrics), torch.zeros(2, device=self.world.device, dtype=torch.float64)
        self._refresh()
        with self._averaged_weights() if averaged else nullcontext(), self._low.shared():
            self.engine.model.eval()
            try:
                for batch in batches:
                    totals += self.passes.forward(self._part(batch), sums)
            finally:
                self.engine.model.train()
        loss = Totals(local=totals, summed=totals, work=self.world.start_sum(totals), known_weight=None).mean
        return {LOSS: float(loss)} | sums.results(self.world)

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Compute with the averaged weights. All ranks must enter and leave it together."""
        if self.ema is None:
            raise JobError("There are no averaged weights; give Job(ema=...) a decay.")
        weights = self.ema.exchange()
        self._is_stale = True
        self._refresh()
        try:
            yield
        finally:
            self.ema.exchange(weights)
            self._is_stale = True
        self._refresh()  # not after an error, which other ranks may not have seen

    def _refresh(self) -> None:
        """Compute with the masters as they are now. Collective if they have changed."""
        if self._is_stale:
            if self.host:
                self.host.give_all_parameters()
            self.engine.loaded()
            self._is_stale = False

    def _part(self, batch: Any) -> Batch:
        if isinstance(batch, Batch):
            return batch.to(self.world.device)
        with outside_of_modes():
            own = part(batch, self.share, self.cutter, nominal=self.job.global_batch)
        return own.to(self.world.device)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._own if p.grad is not None]

    def _scale_up(self) -> float:
        """The factor of the loss. Under fp16 the engine's scale is applied later, because it could overflow."""
        return self.loss_scale.value if self.loss_scale else self.engine.gradient_scale

    def _scale_down(self) -> float:
        """The factor of the gradients that undoes the loss scale."""
        return self.engine.gradient_scale / self.loss_scale.value if self.loss_scale else 1.0

    def _scale_down_and_clip(self, norm: torch.Tensor, scale: float) -> bool:
        """Scale and clip in one pass. False if fp16 overflowed; all ranks agree because they have the same norm."""
        if self.loss_scale and not isfinite(float(norm)):
            return False
        factor: torch.Tensor | float = scale
        if self.job.max_norm is not None:
            factor = factor * torch.clamp(self.job.max_norm / (norm + 1e-6), max=1.0)
        # On a CPU reading the factor is free, and most steps need no clipping.
        if torch.is_tensor(factor) and not factor.is_cuda:
            factor = float(factor)
        if torch.is_tensor(factor) or factor != 1.0:
            scale_(self._gradients(), factor)
        return True

    def _clip_and_apply(self) -> tuple[torch.Tensor, bool]:
        """The gradients' norm, and whether the optimizer took its step."""
        norm = self.engine.norm(self._own) * self._scale_down()
        scale = self._scale_down()
        if self.job.on_gradient is not None and (not self.loss_scale or isfinite(float(norm))):
            scale_(self._gradients(), scale)
            apply_hook(
                self.job.on_gradient, self._own, Dropout(run_seed=self.seed, device=self.world.device), self.steps
            )
            norm, scale = self.engine.norm(self._own), 1.0
        if self.holds_back and not isfinite(float(norm)):
            return norm, False
        if not self._scale_down_and_clip(norm, scale):
            return norm, False
        if self.host:
            self.host.take_gradients()
        groups = one_mesh_per_group(self.optimizer) if self.strategy.batch_splits > 1 else nullcontext()
        with naming_optimizer(self.strategy, self.optimized), groups:
            self.optimizer.step()
        if self.host:
            self.host.give_parameters()
        self.engine.updated()
        return norm, True


def _keep_attributes(parameters: NamedParameters, model: torch.nn.Module) -> None:
    """Copy attributes that the model's author set (`p.no_decay = True`) to the parameters that the optimizer gets."""
    originals = dict(model.named_parameters())
    for name, parameter in parameters.named():
        for key, value in vars(originals.get(name, parameter)).items():
            vars(parameter).setdefault(key, value)


def _nothing_to_update() -> NamedParameters:
    """A dummy parameter for a rank whose stages are frozen, because optimizers refuse an empty list."""
    return NamedParameters([("", torch.nn.Parameter(torch.empty(0)))])
