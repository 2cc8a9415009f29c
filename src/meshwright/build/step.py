"""One optimizer step over a global batch: split, forward and backward, normalise, clip, update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Any

import torch
import torch.distributed as dist

from meshwright.build.batch import Batch, MicroBatch, count_samples, micro_batches, part
from meshwright.build.build import lay_out
from meshwright.build.host import HostCopies
from meshwright.build.norm import global_norm, scale_
from meshwright.build.precision import LossScale, loss_under
from meshwright.build.world import World
from meshwright.describe.blueprint import record
from meshwright.describe.model import call_model
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Totals:
    """A rank's sum and weight of the loss, on their way to being all ranks'."""

    local: torch.Tensor
    """This rank's own sum, to find out who went wrong."""
    summed: torch.Tensor
    """Sum and weight; all ranks' once the work is done."""
    work: dist.Work | None
    known_weight: float | None
    """The global weight, where it follows from shapes."""

    @property
    def weight(self) -> float | torch.Tensor:
        self.wait()
        return self.summed[1] if self.known_weight is None else self.known_weight

    @property
    def mean(self) -> torch.Tensor:
        self.wait()
        return self.summed[0] / self.weight

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step gave, the same on every rank. Numbers stay on the device and on their way until they are read."""

    step: int
    samples: int
    lr: float
    totals: Totals
    norm_tensor: torch.Tensor
    skipped: bool = False
    """Whether fp16 gradients overflowed, so that nothing was updated."""

    @property
    def loss_tensor(self) -> torch.Tensor:
        return self.totals.mean

    @property
    def loss(self) -> float:
        return float(self.totals.mean)

    @property
    def grad_norm(self) -> float:
        return float(self.norm_tensor)


class Trainer:
    """A job laid out under a strategy, with its optimizer: everything that a step needs."""

    def __init__(self, job: Job, facts: ModelFacts, strategy: Strategy, world: World, *, seed: int) -> None:
        self.job, self.facts, self.strategy, self.world, self.seed = job, facts, strategy, world, seed
        self.engine = lay_out(record(job.model, seed), facts, strategy, world)
        self.engine.model.train()
        self._loss = loss_under(strategy.precision, job, compiled=strategy.compile)
        self._own = self.engine.parameters()
        self.host = HostCopies(self._own) if strategy.offload == "optimizer" else None
        self.optimizer = job.optimizer(self.host.parameters if self.host else self._own)
        self.schedule = job.schedule(self.optimizer) if job.schedule else None
        self.loss_scale = LossScale() if strategy.precision == "fp16" else None
        self.steps = 0
        self._pending: tuple[Totals, int] | None = None

    @property
    def data_ranks(self) -> int:
        return 1 if self.strategy.data == "dp" else self.strategy.data_ranks

    @property
    def data_rank(self) -> int:
        return 0 if self.strategy.data == "dp" else self.world.rank

    def step(self, batch: Any) -> StepResult:
        """One optimizer step. A `Batch` is this rank's part; anything else is the whole global batch, on all ranks."""
        self.forward_backward(batch)
        return self.update()

    def forward_backward(self, batch: Any) -> None:
        """Leave the gradient of the global batch's mean loss on the parameters (under fp16, times the loss scale)."""
        own = self._part(batch)
        expected = self.facts.weight_per_sample
        # Where the weight depends on the data it is not known yet: divide by the samples now and put it right below.
        divisor = own.samples * (expected if expected is not None else 1.0)
        factor = self._scale_up() / divisor
        pieces = list(micro_batches(own))
        totals = torch.zeros(2, device=self.world.device, dtype=torch.float32)
        for index, piece in enumerate(pieces):
            with self.engine.accumulating(last=index == len(pieces) - 1):
                totals += self._one(piece, factor, expected)
        self.engine.finish()
        local = totals[0].clone()
        work = self.world.start_sum(totals) if self.data_ranks > 1 else None
        known = divisor if expected is not None else None
        sums = Totals(local=local, summed=totals, work=work, known_weight=known)
        if known is None:
            scale_(self._gradients(), divisor / sums.weight)
        self._pending = sums, own.samples

    def update(self) -> StepResult:
        """Clip by the global norm and step the optimizer and its schedule."""
        if self._pending is None:
            raise JobError("update() was called without a forward_backward(batch) before it.")
        (totals, samples), self._pending = self._pending, None
        norm = global_norm(self._gradients()) * self._scale_down()
        finite = self._scale_down_and_clip(norm)
        if self.loss_scale:
            self.loss_scale.after(finite)
        lr = float(self.optimizer.param_groups[0]["lr"])
        if finite:
            self._apply()
        for parameter in self._own:
            parameter.grad = None
        self.engine.forget_gradients()
        self.steps += 1
        return StepResult(
            step=self.steps,
            samples=samples,
            lr=lr,
            totals=totals,
            norm_tensor=norm,
            skipped=not finite,
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over batches, forward only."""
        self.engine.model.eval()
        totals = torch.zeros(2, device=self.world.device, dtype=torch.float64)
        for batch in batches:
            for piece in micro_batches(self._part(batch)):
                total, weight = self._loss(call_model(self.job, self.engine, piece.data), piece.data)
                totals += torch.stack([total.double(), torch.as_tensor(weight, device=total.device).double()]) * (
                    piece.span.length > 0
                )
        self.engine.model.train()
        work = self.world.start_sum(totals) if self.data_ranks > 1 else None
        return float(Totals(local=totals, summed=totals, work=work, known_weight=None).mean)

    def _part(self, batch: Any) -> Batch:
        if isinstance(batch, Batch):
            return batch.to(self.world.device)
        if count_samples(batch) == 0:
            raise JobError("A batch without samples was given to step().")
        return part(batch, self.data_ranks, self.data_rank, self.strategy.micro_batch).to(self.world.device)

    def _one(self, piece: MicroBatch, factor: float, expected: float | None) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns its sum and weight."""
        # Dropout depends on the seed, the step and the place in the global batch, never on ranks: two strategies that
        # cut the batch into the same micro-batches draw the same masks.
        self._seed_dropout((self.seed * 1_000_003 + self.steps) * 1_000_003 + piece.span.first)
        total, weight = self._loss(call_model(self.job, self.engine, piece.data), piece.data)
        counts = 1.0 if piece.span.length else 0.0
        (total * (factor * counts)).backward()
        if expected is None:
            value = torch.as_tensor(weight, dtype=torch.float32, device=total.device) * counts
            return torch.stack([total.detach().float() * counts, value])
        if piece.span.length and not isclose(float(weight), expected * piece.span.length, rel_tol=1e-9):
            raise JobError(
                f"Job(loss=...) gave the weight {weight} for {piece.span.length} samples, where {expected:g} a sample "
                "was seen at first; give a weight that depends on the data as a tensor."
            )
        return torch.stack([total.detach().float() * counts, total.new_zeros(()).float()])

    def _seed_dropout(self, seed: int) -> None:
        seed %= 2**63
        torch.default_generator.manual_seed(seed)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._own if p.grad is not None]

    def _scale_up(self) -> float:
        """What the loss is multiplied by. fp16 overflows, so there the ranks that are averaged over come later."""
        return self.loss_scale.value if self.loss_scale else self.engine.gradient_scale

    def _scale_down(self) -> float:
        """What gradients are multiplied by to undo it."""
        return self.engine.gradient_scale / self.loss_scale.value if self.loss_scale else 1.0

    def _scale_down_and_clip(self, norm: torch.Tensor) -> bool:
        """In one pass over the gradients. False if fp16 overflowed, which all ranks see: they have the same norm."""
        if self.loss_scale and not isfinite(float(norm)):
            return False
        factor: torch.Tensor | float = self._scale_down()
        if self.job.max_norm is not None:
            factor = factor * torch.clamp(self.job.max_norm / (norm + 1e-6), max=1.0)
        # On a CPU the factor is known at once, and most steps of most trainings are not clipped.
        if torch.is_tensor(factor) and not factor.is_cuda:
            factor = float(factor)
        if torch.is_tensor(factor) or factor != 1.0:
            scale_(self._gradients(), factor)
        return True

    def _apply(self) -> None:
        if self.host:
            self.host.take_gradients()
        self.optimizer.step()
        if self.host:
            self.host.give_parameters()
        if self.schedule is not None:
            self.schedule.step()
        self.engine.updated()
