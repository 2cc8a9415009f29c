"""What a user's loop did to gradients between backward and step, compared between ranks.

After a backward pass gradients are right on every rank, but the loop may change them. A change that a rank computes
from its own numbers is wrong on all: a norm of its shards, a gradient of its own samples. No rank sees that alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, isfinite, isnan, nan
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from meshwright.assemble.axes import Axes
from meshwright.assemble.world import World
from meshwright.errors import JobError
from meshwright.facts.strategy import Strategy
from meshwright.recording.dtensor import is_dtensor
from meshwright.runtime.loop_order import small_messages
from meshwright.strategies.norm import local

FIRST_STEPS = 5
EVERY = 20
"""The first steps are compared, and then one of so many: each reads all gradients twice."""
SAME = 1e-5
"""How far equal gradients may be apart on two ranks, relative to their size."""
NEAR = 1e-2
"""The same for what the ranks of tp and op compute alike from rounded parts."""
SCALED = 1e-3
"""How far apart factors are that are not meant to be the same."""


class GradientChecks:
    """Compares the gradients of one model with what they were after the backward pass, and between ranks."""

    def __init__(self, strategy: Strategy, axes: Axes, world: World, cut: set[int]) -> None:
        """`cut` are the ids of the parameters that tp or op divide. All ranks must make one together."""
        self._strategy, self._axes, self._world, self._cut = strategy, axes, world, cut
        self._steps = 0
        self._after_backward: dict[int, torch.Tensor] = {}
        if self._compares:
            small_messages(world)

    @property
    def _compares(self) -> bool:
        # With stages, ranks hold other parameters, and gradients are complete without a backward pass of the loop.
        return self._world.ranks > 1 and not self._world.fake and self._axes.stages is None

    @property
    def is_due(self) -> bool:
        """Whether the next step's gradients are compared."""
        return self._compares and (self._steps < FIRST_STEPS or self._steps % EVERY == 0)

    def reduced(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the gradients of a backward pass that has ended."""
        self._after_backward = {}
        if self.is_due:
            self._after_backward = {id(p): _sizes([p]) for p in parameters if p.grad is not None}

    def before_step(self, parameters: list[nn.Parameter]) -> None:
        """Raise if these parameters' gradients cannot be right. All ranks call it."""
        if self.is_due:
            self._refuse(self._compared(parameters))
        self._steps += 1

    def _compared(self, parameters: list[nn.Parameter]) -> list[Told]:
        """What every rank tells of its gradients."""
        with_gradient = [p for p in parameters if p.grad is not None]
        own = [
            float(self._axes.data_rank),
            float(sum(mesh.get_local_rank() for _, mesh in self._axes.inner)),
            self._factor(with_gradient),
            *_sizes([p for p in with_gradient if not is_dtensor(p)]).tolist(),
            *_sizes([p for p in with_gradient if id(p) not in self._cut]).tolist(),
        ]
        rows = [torch.empty(len(own), dtype=torch.float64) for _ in range(self._world.ranks)]
        dist.all_gather(rows, torch.tensor(own, dtype=torch.float64), small_messages(self._world))
        return [Told(*row.tolist()) for row in rows]

    def _factor(self, parameters: list[nn.Parameter]) -> float:
        """The factor by which gradients were multiplied since the backward pass; infinite if it was no factor."""
        known = [p for p in parameters if id(p) in self._after_backward]
        if not known:
            return nan
        before = torch.stack([self._after_backward[id(p)] for p in known]).sum(0)
        ratio, squared = (_sizes(known) / before).tolist()
        # Anything else than a factor changes sums and squares in another way.
        return inf if isfinite(ratio) and abs(ratio**2 - squared) > SCALED * squared else ratio

    def _refuse(self, told: list[Told]) -> None:
        factors = [one.factor for one in told if not isnan(one.factor)]
        if factors and max(factors) < inf and max(factors) - min(factors) > SCALED * max(factors):
            raise JobError(
                f"Gradients were multiplied by different numbers on the ranks of {self._strategy}, from "
                f"{min(factors):.4g} to {max(factors):.4g}. A norm of p.grad is that of this rank's part: clip with "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), ...), which sums over the ranks."
            )
        over_data = _differ(told, lambda one: one.inner_rank, lambda one: (one.whole, one.whole_squared), SAME)
        if over_data or _differ(told, lambda one: one.data_rank, lambda one: (one.uncut, one.uncut_squared), NEAR):
            raise JobError(
                f"{'Data ranks' if over_data else 'Ranks'} of {self._strategy} would update the same parameters by "
                "different gradients. Those of loss.backward() are averaged over ranks; those of torch.autograd.grad, "
                "and changes by a rank's own numbers, are not. Compute them with backward, or change p.grad alike on "
                "all ranks."
            )


class Told(NamedTuple):
    """What a rank tells of its gradients."""

    data_rank: float
    inner_rank: float
    factor: float
    whole: float
    """Of the parameters that the data axis does not divide: the sum of absolute values, and of squares."""
    whole_squared: float
    uncut: float
    """The same of those that tp or op do not divide."""
    uncut_squared: float


def _differ(
    told: list[Told], place: Callable[[Told], float], sizes: Callable[[Told], tuple[float, float]], near: float
) -> bool:
    """Whether ranks at the same place, which hold the same parameters, tell different sizes of their gradients."""
    for where in {place(one) for one in told}:
        for numbers in zip(*(sizes(one) for one in told if place(one) == where), strict=True):
            if all(map(isfinite, numbers)) and max(numbers) - min(numbers) > near * max(numbers):
                return True
    return False


@torch.no_grad()
def _sizes(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The sums of all gradients' absolute values and squares."""
    total = torch.zeros(2, dtype=torch.float64)
    for parameter in parameters:
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        own = gradient.coalesce().values() if gradient.is_sparse else gradient
        sums = [own.abs().sum(dtype=torch.float64), own.double().square().sum()]
        total = total.to(own.device) + torch.stack(sums)
    return total.cpu()
