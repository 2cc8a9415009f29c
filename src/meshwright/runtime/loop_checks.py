"""What ranks compare while a user's loop runs: mistakes that no rank sees alone, and that would go on silently."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.assemble.axes import Axes
from meshwright.assemble.world import World
from meshwright.describe.structure import tensors_of
from meshwright.errors import JobError
from meshwright.facts.strategy import Strategy
from meshwright.torch_private.modules import Dropout

COMPARED_CALLS = 3
"""Training calls of which ranks compare the inputs."""


def count_samples(args: Any, kwargs: Any) -> int:
    """The first dim of the first tensor among the inputs."""
    return next((int(tensor.shape[0]) for tensor in tensors_of((args, kwargs)) if tensor.dim()), 0)


class LoopChecks:
    """Compares inputs and sample counts over the ranks of one model."""

    def __init__(self, strategy: Strategy, axes: Axes, world: World) -> None:
        """All ranks must make one together."""
        self._strategy, self._axes, self._world = strategy, axes, world
        self.batch_group = axes.batch_group(world)
        self._calls = self._evaluations = 0
        self._counts: list[tuple[torch.Tensor, dist.Work | None]] = []
        self.weighted = False
        """Whether the loss of the next pass is a mean over all ranks, so that their counts may differ."""

    def before_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Compare the inputs of the first training calls."""
        if self._calls >= COMPARED_CALLS or self._world.ranks == 1:
            return
        self._calls += 1
        digest = _digest(args, kwargs)
        for term, mesh in self._axes.inner:
            self._refuse_different(digest, term, mesh.get_group())
            state = _random_state(self._world.device)
            if model.training and _draws(model) and not self._is_same(state, mesh.get_group()):
                raise JobError(
                    f"The ranks of {term} have different random states, so their dropout masks differ; call "
                    "torch.manual_seed with the same number on all of them before the loop."
                )
        if self._calls == 1 and self.batch_group is not None and self._is_same(digest, self.batch_group):
            warnings.warn(
                "All data ranks were given the same samples in the first call; divide the data with "
                "DistributedSampler(data, num_replicas=model.data_ranks, rank=model.data_rank).",
                stacklevel=2,
            )

    def before_evaluation(self, args: Any, kwargs: Any) -> None:
        """Compare the inputs of the first calls without gradients: all ranks of tp and op compute them together."""
        if self._evaluations >= COMPARED_CALLS or not self._axes.inner or self._world.fake:
            return
        self._evaluations += 1
        digest = _digest(args, kwargs)
        for term, mesh in self._axes.inner:
            self._refuse_different(digest, term, mesh.get_group())

    def _refuse_different(self, digest: torch.Tensor, term: Any, group: dist.ProcessGroup) -> None:
        if not self._is_same(digest, group):
            raise JobError(
                f"The ranks of {term} were given different samples, but they compute one model together. Give them "
                "the same: DistributedSampler(data, num_replicas=model.data_ranks, rank=model.data_rank)."
            )

    def reduced(self, samples: list[int]) -> None:
        """Start to compare how many samples each data rank had in the backward passes of a reduction."""
        weighted, self.weighted = self.weighted, False
        if self._world.ranks == 1 or (group := self._world.group) is None:
            return
        # The second number tells passes of 4 and 3 samples from passes of 3 and 4.
        told = [sum(samples), sum(place * count for place, count in enumerate(samples, start=1))]
        told = [0, 0] if weighted else told
        counts = torch.tensor([*told, *(-count for count in told)], device=_device_of(group, self._world.device))
        self._counts.append((counts, dist.all_reduce(counts, dist.ReduceOp.MAX, group, async_op=True)))

    def before_step(self) -> None:
        """Raise if ranks had different numbers of samples since the last step."""
        counts, self._counts = self._counts, []
        for most_and_least, work in counts:
            if work is not None:
                work.wait()
            most, other, least, different = most_and_least.tolist()
            if most + least or other + different:
                had = f"from {-least} to {most}" if most + least else "different numbers of"
                raise JobError(
                    f"Data ranks of {self._strategy} had {had} samples in one backward pass, so the mean over "
                    "ranks of their mean losses is not the mean over samples. Compute the loss as "
                    "model.global_mean(loss_sum, samples), or drop the uneven batch (DataLoader(drop_last=True))."
                )

    def _is_same(self, value: torch.Tensor, group: dist.ProcessGroup) -> bool:
        both = torch.cat([value, -value]).to(_device_of(group, self._world.device))
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
        most, least = both.chunk(2)
        return bool((most == -least).all())

    def on_any_data_rank(self, found: bool) -> bool:
        flag = torch.tensor([float(found)])
        if self.batch_group is not None:
            flag = flag.to(_device_of(self.batch_group, self._world.device))
            dist.all_reduce(flag, dist.ReduceOp.MAX, self.batch_group)
        return bool(flag)

    def sum_over_data(self, value: torch.Tensor) -> torch.Tensor:
        if self.batch_group is not None:
            dist.all_reduce(value, group=self.batch_group)
        return value


def _digest(args: Any, kwargs: Any) -> torch.Tensor:
    """A few numbers that are equal for equal inputs."""
    found = torch.zeros(2, dtype=torch.float64)
    for place, tensor in enumerate(tensors_of((args, kwargs)), start=1):
        plain = tensor.detach().nan_to_num() if tensor.is_floating_point() else tensor.detach()
        values = (plain.abs() if plain.is_complex() else plain).flatten().double().cpu()
        ramp = torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64)
        found += torch.stack([values.sum(), (values * ramp).sum()]) * place
    return found


def _random_state(device: torch.device) -> torch.Tensor:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return (state.double() * torch.linspace(1.0, 2.0, state.numel(), dtype=torch.float64)).sum()[None]


def _draws(model: nn.Module) -> bool:
    """Whether the model has a dropout module that drops, or a probability that a function may use."""
    chances = (getattr(one, "p" if isinstance(one, Dropout) else "dropout", 0) for one in model.modules())
    return any(isinstance(chance, float) and chance > 0 for chance in chances)


def _device_of(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where a group takes small messages: on the host if it can, because reading a result would stall a GPU."""
    return torch.device("cpu") if "cpu" in dist.get_backend_config(group) else device
