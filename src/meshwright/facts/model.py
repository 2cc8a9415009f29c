"""What is known about a model before any weight exists."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from meshwright.facts.tensor_plan import TensorPlan


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """One parameter. A tied parameter has several names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool = True
    used: bool = True
    """Whether the loss depends on it, according to a step on fake tensors."""
    contiguous: bool = True
    """Whether its memory format is contiguous, and not `channels_last`, say."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def count(self) -> int:
        return prod(self.shape)


def unit_of(name: str, units: Collection[str]) -> str:
    """The innermost of these modules that holds a parameter; empty if none does."""
    while name := name.rpartition(".")[0]:
        if name in units:
            return name
    return ""


@dataclass(frozen=True, kw_only=True)
class CallFacts:
    """One call in the forward pass, of a block or of a module with parameters outside of blocks."""

    name: str
    flops: float
    """FLOPs of its forward pass for two samples."""
    reads: tuple[str, ...]
    """The parameters that it reads, by their first names."""


@dataclass(frozen=True, kw_only=True)
class MovedFacts:
    """A parameter, buffer or plain attribute that every forward pass changes."""

    name: str
    parameter: bool = False
    by_samples: bool = True
    """Whether its new value depends on the samples, as far as a trial shows."""


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """The linear layer whose output a cross entropy reads."""

    weight: str
    """The first name of its weight."""
    module: str
    """The innermost module that runs when the layer is computed; empty for the model itself."""
    classes: int
    width: int
    needed_by: tuple[str, ...] = ()
    """Functions besides the loss that read all logits."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What strategies need to know about a model, found on fake tensors without using memory."""

    parameters: tuple[ParameterFacts, ...]
    blocks: tuple[str, ...]
    """Names of the modules that are recomputed and compiled as units."""
    shard_units: tuple[str, ...] = ()
    """Names of the modules whose parameters are gathered and reduced together; the others' are with the model's."""
    calls: tuple[CallFacts, ...] = ()
    """The calls of blocks and of modules around them, in order. A pipeline may cut between them."""
    optimizer_slots: float = 2.0
    """Bytes of optimizer state per byte of parameter: 2 for Adam, 1 for momentum, 0 for plain SGD."""
    couplings: tuple[str, ...] = ()
    """What else the update of an element depends on besides its own gradient: "rows" or "columns" of its tensor, or
    other "parameters"."""
    batch_norms: tuple[str, ...] = ()
    """Modules whose output depends on which samples share a batch."""
    weight_per_sample: float | None = None
    """The loss's weight of one sample if shapes determine it; None if it depends on the data."""
    loss_over: str = "samples"
    """What the loss is computed over: "samples", if it is a sum over them; "batch", if it needs all their outputs;
    "model", if outputs depend on which samples share a batch; "backward", if gradients do."""
    mixed_output: str = ""
    """For "model", the part of the output that depends on other samples; for "backward", the parameter."""
    tensor_plan: TensorPlan | None = None
    """How tensor parallelism would divide the model; None if no step could be observed."""
    head: HeadFacts | None = None
    """The output layer, if a cross entropy reads it; None if none does, or if no step could be observed."""
    read_elsewhere: tuple[str, ...] = ()
    """Parameters that are read outside of the module that holds them, such as a tied weight in a function call."""
    read_outside: tuple[str, ...] = ()
    """Parameters of shard units that are read while their unit is not running."""
    moved: tuple[MovedFacts, ...] = ()
    """State that forward changes, except BatchNorm's."""
    by_value: bool = False
    """Whether the model reads values of tensors, so that samples may decide which parameters are used."""
    blocks_by_value: bool = False
    """Whether samples may also decide which blocks run."""
    assumed: tuple[str, ...] = ()
    """What forecasts assume where the model reads values: sentences that name the lines of its code."""
    drops: bool = False
    """Whether a training step draws random numbers, as dropout does."""
    unseen: str = ""
    """Why a step on fake tensors could not run; empty if it did."""

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
        plan, head = document.get("tensor_plan"), document.get("head")
        values = {
            "parameters": parameters,
            "calls": calls,
            "moved": moved,
            "head": head and HeadFacts(**{**head, "needed_by": tuple(head["needed_by"])}),
            "tensor_plan": plan and TensorPlan.from_json(plan),
        }
        names = ("blocks", "shard_units", "batch_norms", "read_elsewhere", "read_outside", "couplings", "assumed")
        return cls(**{**document, **values, **{name: tuple(document.get(name, ())) for name in names}})
