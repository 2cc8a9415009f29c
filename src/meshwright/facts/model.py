"""What is known about a model before any weight exists."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from meshwright.facts.tensor_plan import TensorPlan

VOCABULARY = 4096
"""Classes from which on a cross entropy is over a vocabulary; ImageNet has 1,000."""


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


LOSS_FORMS = {
    "divided_twice": "a mean, returned with a weight that grows with the batch: the gradient is divided by it again",
    "constant_weight": "a sum over samples, returned with a weight that does not grow with the batch",
    "mean_of_mean": "a mean with weight 1: right for a whole batch, but parts of it have to be gathered first",
    "mean_without_padding": "a mean over targets that are not padding, with the weight of all of them",
    "padding_counted": "a sum over targets that are not padding, with a weight that counts the padding",
    "other_count": "a sum over targets, returned with a weight that counts neither these targets nor samples",
}
"""What an experiment with the loss may find wrong with its sum or weight."""


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
    saved: bool = True
    """Whether it is in the model's state dict, and so in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class DrawFacts:
    """A place in the model or the loss that draws random numbers in a training step."""

    operator: str
    """The random operator, or the generator that is not PyTorch's: "random" or "numpy.random"."""
    module: str | None = ""
    """The innermost module that runs; empty for the model itself, None in the loss."""
    file: str = ""
    line: int = 0
    dropout: bool = False
    """Whether it is PyTorch's dropout, which `verify` switches off."""


@dataclass(frozen=True, kw_only=True)
class CollectiveFacts:
    """A call of a function of torch.distributed in the code of the model or the loss."""

    name: str
    module: str | None = ""
    """A module whose forward may call it; empty for the model itself, None for the loss."""
    file: str = ""
    line: int = 0


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
class ExpertFacts:
    """Experts of one mixture: modules or rows of stacked weights, of which each token uses a few."""

    module: str
    """The module that holds stacked weights, or the list of modules."""
    experts: int
    parameters: tuple[str, ...]
    """The names of all experts' parameters."""
    stacked: bool = True
    """Whether one call computes all experts from weights `[experts, ...]`; otherwise each expert is a module."""
    caller: str = ""
    """The module whose forward calls the experts of a list."""
    chosen: int = 1
    """Experts that a token uses."""
    rows: float = 0.0
    """Tokens per sample that experts compute, each counted once for every expert that it uses."""
    width: int = 0
    """Elements of a token where it enters an expert."""
    weighted: bool = False
    """Whether the module that holds the experts applies the routing weights."""


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
    tokens: tuple[int, ...] = ()
    """Tokens of a sample in what blocks return as (batch, tokens, width): each number that occurs, smallest first."""
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
    mixing_module: str | None = None
    """For "model", the first module whose output for a sample depends on other samples; None if it was not found."""
    loss_form: str = ""
    """What is wrong with the loss's sum or weight, a key of `LOSS_FORMS`; empty if nothing was found."""
    tensor_plan: TensorPlan | None = None
    """How tensor parallelism would divide the model; None if no step could be observed."""
    experts: tuple[ExpertFacts, ...] = ()
    """The mixtures of experts that structure shows."""
    head: HeadFacts | None = None
    """The output layer, if a cross entropy reads it; None if none does, or if no step could be observed."""
    read_elsewhere: tuple[str, ...] = ()
    """Parameters that are read outside of the module that holds them, such as a tied weight in a function call."""
    read_outside: tuple[str, ...] = ()
    """Parameters of shard units that are read while their unit is not running."""
    moved: tuple[MovedFacts, ...] = ()
    """State that forward changes, except BatchNorm's."""
    aliased: tuple[tuple[str, str], ...] = ()
    """Pairs of different parameters that share memory, as after `head.weight.data = token.weight.data`."""
    evaluated: tuple[str, ...] = ()
    """Modules that the builder puts into eval mode while others train; each training step starts with `train()`."""
    by_value: bool = False
    """Whether the model reads values of tensors, so that samples may decide which parameters are used."""
    blocks_by_value: bool = False
    """Whether samples may also decide which blocks run."""
    assumed: tuple[str, ...] = ()
    """What forecasts assume where the model reads values: sentences that name the lines of its code."""
    drops: bool = False
    """Whether a training step draws random numbers, as dropout does."""
    draws: tuple[DrawFacts, ...] = ()
    """Where it draws them, as far as one step shows."""
    collectives: tuple[CollectiveFacts, ...] = ()
    """Collectives in the code of the model and the loss."""
    unseen: str = ""
    """Why a step on fake tensors could not run; empty if it did."""

    @property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.trainable and not p.used)

    @property
    def gathered_units(self) -> tuple[str, ...]:
        """The shard units of strategies that gather parameters for them: none if ranks may call different ones."""
        return () if self.blocks_by_value else self.shard_units

    @property
    def models_language(self) -> bool:
        """Whether it is a stack of blocks that ends in a cross entropy over a vocabulary."""
        return bool(self.blocks) and self.head is not None and self.head.classes >= VOCABULARY

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
        draws = tuple(DrawFacts(**draw) for draw in document.get("draws", ()))
        plan, head = document.get("tensor_plan"), document.get("head")
        values = {
            "parameters": parameters,
            "calls": calls,
            "moved": moved,
            "draws": draws,
            "experts": tuple(
                ExpertFacts(**{**one, "parameters": tuple(one["parameters"])}) for one in document.get("experts", ())
            ),
            "collectives": tuple(CollectiveFacts(**call) for call in document.get("collectives", ())),
            "aliased": tuple(tuple(pair) for pair in document.get("aliased", ())),
            "head": head and HeadFacts(**{**head, "needed_by": tuple(head["needed_by"])}),
            "tensor_plan": plan and TensorPlan.from_json(plan),
        }
        reads = ("read_elsewhere", "read_outside")
        names = ("blocks", "shard_units", "batch_norms", *reads, "couplings", "assumed", "evaluated", "tokens")
        return cls(**{**document, **values, **{name: tuple(document.get(name, ())) for name in names}})
