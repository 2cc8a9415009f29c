"""What is known of a model before any weight exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from meshwright.facts.tensor_plan import TensorPlan


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """One parameter. Tied names are one parameter with several names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool = True
    used: bool = True
    """Whether the loss depends on it, as far as a step on fake tensors shows."""
    contiguous: bool = True
    """Whether its rows lie one after another in memory; not under `channels_last`."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class CallFacts:
    """One call of a block, or of a module with parameters outside of blocks, in the forward pass."""

    name: str
    flops: float
    """Of its forward pass, for two samples."""
    reads: tuple[str, ...]
    """Parameters that it reads, by their first names."""


@dataclass(frozen=True, kw_only=True)
class MovedFacts:
    """A parameter, buffer or plain attribute that every forward pass changes."""

    name: str
    parameter: bool = False
    by_samples: bool = True
    """Whether it ends elsewhere with other samples, as far as it could be tried."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What strategies ask of a model. Found on fake tensors, so it costs no memory."""

    parameters: tuple[ParameterFacts, ...]
    blocks: tuple[str, ...]
    """Names of the modules that are sharded, recomputed and compiled as one."""
    calls: tuple[CallFacts, ...] = ()
    """Where a pipeline may cut: the calls of blocks and of modules around them, in order."""
    optimizer_slots: float = 2.0
    """Bytes of optimizer state per byte of parameter: 2 for Adam, 1 for momentum, 0 for plain SGD."""
    couplings: tuple[str, ...] = ()
    """What the optimizer's update of a number depends on beside its own gradients: "rows" or "columns" of its tensor,
    other "parameters"."""
    batch_norms: tuple[str, ...] = ()
    """Modules whose output depends on which samples share a batch."""
    weight_per_sample: float | None = None
    """The loss's weight of one sample where it follows from shapes; None where it depends on the data."""
    loss_over: str = "samples"
    """What the loss is of: "samples", a sum over them; "batch", the outputs of all of them; "model", where outputs
    themselves depend on which samples share a batch; "backward", where gradients do."""
    mixed_output: str = ""
    """For "model", the part of the output that does; for "backward", the parameter."""
    tensor_plan: TensorPlan | None = None
    """How tensor parallelism would divide it; None where no step could be seen."""
    read_elsewhere: tuple[str, ...] = ()
    """Parameters that are read outside of the module that holds them, as a tied weight in a function call is."""
    read_outside: tuple[str, ...] = ()
    """Parameters of blocks that are read while their block is not running."""
    moved: tuple[MovedFacts, ...] = ()
    """State that forward moves, beside BatchNorm's."""
    by_value: bool = False
    """Whether the model looks at values, so that samples may decide which parameters are used."""
    blocks_by_value: bool = False
    """Whether samples may also decide which blocks run."""
    drops: bool = False
    """Whether a training step draws random numbers, as dropout does."""
    unseen: str = ""
    """Why a step on fake tensors could not be run; empty if it was."""

    @property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.trainable and not p.used)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelFacts:
        parameters = tuple(
            ParameterFacts(**{**p, "names": tuple(p["names"]), "shape": tuple(p["shape"])})
            for p in document["parameters"]
        )
        calls = tuple(CallFacts(**{**call, "reads": tuple(call["reads"])}) for call in document.get("calls", ()))
        moved = tuple(MovedFacts(**state) for state in document.get("moved", ()))
        plan = document.get("tensor_plan")
        tensor_plan = TensorPlan.from_json(plan) if plan else None
        lists = {
            key: tuple(document.get(key, ()))
            for key in ("blocks", "batch_norms", "read_elsewhere", "read_outside", "couplings")
        }
        values = {"parameters": parameters, "calls": calls, "moved": moved, "tensor_plan": tensor_plan}
        return cls(**{**document, **values, **lists})
