"""The engine interface: a model under a strategy, which can be called, differentiated and updated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.describe.dtypes import DTYPES
from meshwright.facts.job import NamedParameters
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.cuts import Cut, Stretch
from meshwright.strategies.gather_whole import gather_whole
from meshwright.strategies.norm import global_norm


@dataclass(frozen=True, kw_only=True)
class ApplyContext:
    """The arguments of `apply` besides the model."""

    strategy: Strategy
    facts: ModelFacts
    device: torch.device
    mesh: DeviceMesh | None
    """The data axes; None for one process."""
    fill: Callable[[], None]
    """Allocates the model and fills in initial weights. `apply` calls it once parameters have their final layout."""
    fake: bool = False
    """Whether the other ranks do not exist."""
    apart: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """Parameters that only some data ranks share, because an axis inside the data axis divides them: the mesh of the
    ranks that do. Only strategies that set `sums_apart` get any."""
    pipelined: bool = False
    """Whether a pipeline runs the model: gradients are communicated once, after many backward passes."""
    own_loop: bool = False
    """Whether the user writes the loop: each backward pass averages its gradients over ranks when it ends."""
    devices: tuple[int, ...] = field(default=())
    """All CUDA devices of this process; only DataParallel has more than one."""
    engine_config: Mapping[str, Any] | None = None
    """The user's configuration of a foreign engine, already checked against the strategy and the job."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.strategy.precision]

    @property
    def lowered(self) -> bool:
        """Whether the compute dtype is smaller than that of the master weights."""
        return self.compute_dtype != torch.float32 and not self.strategy.pure and not self.strategy.autocast

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype to which gradients are rounded for their sum over ranks; None: that of the masters."""
        return None if self.strategy.reduce == "fp32" else DTYPES[self.strategy.reduce]

    @property
    def unused(self) -> frozenset[str]:
        return frozenset(self.facts.unused)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The model's blocks; on a stage of a pipeline, those whose parameters it holds."""
        return list(self._held(model, self.facts.blocks).values())

    def shard_units(self, model: nn.Module) -> dict[str, nn.Module]:
        """The model's shard units by name, inner ones first; on a stage of a pipeline, those it holds."""
        innermost_first = sorted(self.facts.shard_units, key=lambda name: -name.count("."))
        return self._held(model, innermost_first)

    def _held(self, model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
        modules = {name: model.get_submodule(name) for name in names}
        return {n: m for n, m in modules.items() if not self.pipelined or any(True for _ in m.parameters())}


@dataclass(frozen=True)
class HeldTensor:
    """What a rank holds of a parameter or persistent buffer."""

    name: str
    """In the unsplit model; a tied parameter appears under each of its names."""
    tensor: torch.Tensor
    """The master; a DTensor if the data axis shards it."""
    cut: Cut | Stretch | None = None
    """Which part of the whole the tensor (or the whole DTensor) is, if a model axis or DeepSpeed divides it."""
    current: bool = True
    """Whether training keeps it up to date. A stage's copy of another stage's buffer is stale."""


Read = Callable[[HeldTensor], torch.Tensor]
"""Reads a tensor of the same shape and layout from a held tensor: itself, or its gradient."""


class Engine:
    """One process's share of the model. Strategies override what differs from a plain model."""

    gradient_scale = 1.0
    """The factor of the loss that turns the engine's average over ranks into a sum."""
    updates_copies = False
    """Whether the model computes with other tensors than `parameters()`, which `updated` refreshes."""
    averages_scaled = False
    """Whether `end_backward` undoes the loss scale of what `leaves` accumulate; otherwise a hook does as it arrives."""

    def __init__(self, model: nn.Module, module: Callable[..., Any] | None = None) -> None:
        self.model = model
        self.module = module if module is not None else model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Context for forward and backward of one micro-batch. Only the last one communicates gradients."""
        return nullcontext()

    def region(self) -> AbstractContextManager[Any]:
        """Context for forward, loss and backward."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def micro_batch_done(self) -> None:
        """Called by a pipeline after a micro-batch's backward, which no context encloses: others are under way."""

    def finish(self) -> None:
        """Complete the gradients after the last backward, so that they are the whole batch's."""

    def leaves(self) -> list[nn.Parameter]:
        """The trained parameters that autograd itself accumulates gradients in."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def reduces(self, asked: bool) -> bool:
        """Prepare for backward passes of a user's loop, and say whether their gradients will be complete.

        A loop asks for it in all passes but those under `no_sync`.
        """
        return True

    def begin_backward(self) -> None:
        """Called in a user's loop when a backward pass reaches the model."""

    def end_backward(self, *, reduced: bool, factor: float) -> None:
        """Called in a user's loop at the end of a backward pass that reached the model.

        If `reduced`, add the mean over data ranks of the gradients that came since the last reduction, times `factor`,
        to the gradients of `parameters()`. The factor undoes fp16's loss scale where `averages_scaled`.
        """

    def attach_used_elsewhere(self, output: torch.Tensor) -> torch.Tensor:
        """An output of the model to which parameters are attached that only other ranks' samples use."""
        return output

    def follow_requires_grad(self) -> None:
        """Freeze what a user's loop froze among `parameters()`, and train it again, before a forward pass."""

    def norm(self, own: NamedParameters) -> torch.Tensor:
        """The 2-norm of all gradients, the same number on every rank.

        `own` is the result of `parameters()`, which is slow because it walks over the model.
        """
        return global_norm([p.grad for p in own if p.grad is not None])

    def counted(self) -> set[int] | None:
        """The ids of those of `parameters()` that this rank counts in a norm; None if it counts all."""
        return None

    def parameters(self) -> NamedParameters:
        """The parameters that this rank's optimizer updates."""
        return NamedParameters((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def updated(self) -> None:
        """Fetch the parameters that other ranks updated, after the optimizer's step."""

    def forget_gradients(self) -> None:
        """Free gradients other than those on `parameters()`, which the caller frees."""

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and buffer, whole, with the unsplit model's names. All ranks must call it."""
        yield from self.collect(lambda held: held.tensor.detach())

    def collect(self, read: Read, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The results of `read` on parameters and buffers, whole. All ranks must call it with the same `names`."""
        found = (held for held in self.held() if names is None or held.name in names)
        yield from gather_whole((held.name, read(held)) for held in found)

    def held(self) -> Iterator[HeldTensor]:
        """What this rank holds of every parameter and persistent buffer. No communication."""
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                yield HeldTensor(name, tensor)

    def cut_of(self, name: str) -> Cut | Stretch | None:
        """Which part of a parameter this rank holds along a model axis; None if it is whole."""
        return None

    def loaded(self) -> None:
        """Update everything derived from masters and buffers after they were loaded. All ranks must call it."""

    def resident(self) -> dict[str, list[torch.Tensor]]:
        """The tensors that this rank holds as parameters and as gradients, for counting their bytes."""
        parameters = list(self.model.parameters())
        return {"parameters": list(parameters), "gradients": [p.grad for p in parameters if p.grad is not None]}


class OptimizingEngine(Engine):
    """An engine that clips gradients, runs the job's optimizer and keeps its state itself."""

    @abstractmethod
    def adopt(self, optimizer: Optimizer, max_norm: float | None) -> None:
        """Take over the job's optimizer of `parameters()`. Called once, before the first step."""

    @abstractmethod
    def optimized(self) -> NamedParameters:
        """The masters that this rank updates, one per parameter."""

    @abstractmethod
    def remembered(self) -> OptimizerState:
        """The optimizer's state of each of `optimized()`."""

    @abstractmethod
    def update(self, scale: float | torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Multiply gradients by `scale`, clip them by their global norm and update.

        Returns the norm, and False if fp16 overflowed and nothing was updated.
        """


class OptimizerState(Protocol):
    """The part of an optimizer's interface that a checkpoint needs; `torch.optim.Optimizer` has it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Mapping[Any, Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
