"""What a strategy makes of a model: something that is called, differentiated and updated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.describe.dtypes import DTYPES
from meshwright.facts.model import ModelFacts
from meshwright.facts.named_parameters import NamedParameters
from meshwright.facts.strategy import Strategy
from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.cuts import Cut, Stretch
from meshwright.strategies.norm import global_norm


@dataclass(frozen=True, kw_only=True)
class ApplyContext:
    """What `apply` needs to know beside the model."""

    strategy: Strategy
    facts: ModelFacts
    device: torch.device
    mesh: DeviceMesh | None
    """The data axes; None for one process."""
    fill: Callable[[], None]
    """Gives the model its memory and initial weights. `apply` calls it once, when parameters lie as they will."""
    fake: bool = False
    """Whether the other ranks are made up."""
    pipelined: bool = False
    """Whether a pipeline runs the model: many backward passes, and gradients are communicated once, after all."""
    devices: tuple[int, ...] = field(default=())
    """All CUDA devices of this process; only DataParallel has more than one."""
    engine_config: Mapping[str, Any] | None = None
    """What the user has written for the engine in its own words, checked against the strategy and the job."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.strategy.precision]

    @property
    def lowered(self) -> bool:
        """Whether computing takes a smaller dtype than the master weights have."""
        return self.compute_dtype != torch.float32 and not self.strategy.pure and not self.strategy.autocast

    @property
    def unused(self) -> frozenset[str]:
        return frozenset(self.facts.unused)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The model's blocks; on a stage of a pipeline, those whose parameters it holds."""
        blocks = [model.get_submodule(name) for name in self.facts.blocks]
        return [block for block in blocks if any(True for _ in block.parameters())] if self.pipelined else blocks


@dataclass(frozen=True)
class HeldTensor:
    """A parameter or persistent buffer as it lies on a rank."""

    name: str
    """In the unsplit model; a tied parameter comes under each of its names."""
    tensor: torch.Tensor
    """The master; a DTensor where the data axis shards it."""
    cut: Cut | Stretch | None = None
    """Which part of the whole the tensor (or the whole DTensor) is, where a model axis or DeepSpeed divides it."""
    current: bool = True
    """Whether training keeps it up to date: a stage's copy of another stage's buffer is not."""


Read = Callable[[HeldTensor], torch.Tensor]
"""Takes something of a held tensor's shape and layout off it: the tensor itself, or its gradient."""


class Engine:
    """One process's share of the model. This one is the plain case; strategies override what differs."""

    gradient_scale = 1.0
    """What the loss is multiplied by because the engine averages over ranks where a sum is wanted."""

    def __init__(self, model: nn.Module, module: Callable[..., Any] | None = None) -> None:
        self.model = model
        self.module = module if module is not None else model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; gradients are communicated in the last one only."""
        return nullcontext()

    def region(self) -> AbstractContextManager[Any]:
        """Around forward, loss and backward."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate what was computed since the last call."""
        loss.backward()

    def finish(self) -> None:
        """After the last backward: wait until every gradient is the whole batch's."""

    def norm(self, own: NamedParameters) -> torch.Tensor:
        """The 2-norm of all gradients as one process would see them; the same number on every rank.

        `own` is what `parameters()` gave: finding them takes a walk over the model, which a step need not take again.
        """
        return global_norm([p.grad for p in own if p.grad is not None])

    def parameters(self) -> NamedParameters:
        """What this rank's optimizer updates."""
        return NamedParameters((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def updated(self) -> None:
        """After the optimizer's step: bring parameters that other ranks updated."""

    def forget_gradients(self) -> None:
        """Let go of gradients beside those on `parameters()`, which the caller forgets."""

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and buffer, whole, in the unsplit model's names. All ranks must take part."""
        yield from self.collect(lambda held: held.tensor.detach())

    def collect(self, read: Read, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """What `read` takes off every parameter and buffer, whole; `names` are those to read, alike on all ranks."""
        for held in self.held():
            if names is None or held.name in names:
                yield held.name, whole(read(held))

    def held(self) -> Iterator[HeldTensor]:
        """What this rank holds of every parameter and persistent buffer, as it lies here. No communication."""
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                yield HeldTensor(name, tensor)

    def cut_of(self, name: str) -> Cut | Stretch | None:
        """Which part of a parameter this rank's is along a model axis; None where it is whole."""
        return None

    def loaded(self) -> None:
        """After masters and buffers were written into: bring what else is made of them. All ranks must take part."""

    def resident(self) -> dict[str, list[torch.Tensor]]:
        """The tensors that this rank holds as parameters and as gradients, for counting their bytes."""
        parameters = list(self.model.parameters())
        return {"parameters": list(parameters), "gradients": [p.grad for p in parameters if p.grad is not None]}


class OptimizingEngine(Engine):
    """An engine that clips and runs the job's optimizer itself, and keeps what belongs to it where it likes."""

    @abstractmethod
    def adopt(self, optimizer: Optimizer, max_norm: float | None) -> None:
        """Take the optimizer that the job made of `parameters()`. Called once, before anything is computed."""

    @abstractmethod
    def optimized(self) -> NamedParameters:
        """The masters that this rank updates, each parameter's by itself."""

    @abstractmethod
    def remembered(self) -> OptimizerState:
        """What the optimizer keeps of each of `optimized()`."""

    @abstractmethod
    def update(self, scale: float | torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Multiply gradients by `scale`, clip them by their global norm and update; the norm, and whether it was done.

        It is not where fp16 overflowed.
        """


class OptimizerState(Protocol):
    """What a checkpoint wants of an optimizer; `torch.optim.Optimizer` is one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Mapping[Any, Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on every rank as one process would hold it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
