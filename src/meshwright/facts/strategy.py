"""Strategies: mesh axes with sizes, and policies. A frozen value with a text form.

`Strategy.parse("fsdp,tp=2,bf16").resolve(8)` is `fsdp=4,tp=2,bf16`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from meshwright.errors import Refused, either
from meshwright.facts import grammar, html, strategy_rules
from meshwright.facts.data_axis import DataTraits, find_traits
from meshwright.facts.grammar import Engine, Loss, Offload, Recompute, Reduce, Sync
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm, normalised
from meshwright.facts.precision import FORMATS, NumberFormat

__all__ = ["AxisTerm", "Engine", "Offload", "Recompute", "Strategy"]

_SHOWN = 3  # suggestions in one message


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a job is distributed. `parse(str(strategy)) == strategy` for every valid strategy."""

    data: str | None = None
    """The data axis, a registered word. None: not named; `resolve` makes it ddp if the other axes leave ranks."""
    data_size: int | None = None
    """Ranks on the whole data axis: R times S for hsdp. None: the ranks that the other axes leave."""
    hsdp_replicas: int | None = None
    """R of `hsdp=RxS`; None for every other data axis. Read `replicas` and `shards` instead."""
    variant: str = ""
    """The suffix of the data axis: what fsdp shards, where "" means everything."""
    axes: tuple[AxisTerm, ...] = ()
    """The axes that divide the model, in the order of the text."""
    precision: str = "fp32"
    """The compute dtype, one of `facts/precision.py`."""
    pure: bool = False
    """Whether parameters have that dtype too, without fp32 master weights."""
    autocast: bool = False
    """Whether `torch.autocast` chooses each operator's dtype, with parameters in fp32."""
    recompute: Recompute = "none"
    """Activation checkpointing: `ac=` in text."""
    offload: Offload = ""
    """State that is offloaded from the device."""
    nvme: str = ""
    """The folder of `offload=nvme:DIR`."""
    micro_batch: int | None = None
    """Samples per micro-batch of one rank: `mb=` in text. None: chosen when the run is built."""
    sync: Sync = "each"
    """When sharded gradients are reduced: after each micro-batch, or whole ones after the last. See `reduces_each`."""
    reduce: Reduce = "fp32"
    """The dtype in which the data axis sums gradients over ranks; under `pure` they always have the compute dtype."""
    loss: Loss = "whole"
    """Whether the output layer and the loss run at once, or in pieces that never hold all logits."""
    compile: bool = False
    graphs: bool = False
    """Whether forward, loss and backward of a micro-batch are replayed as a CUDA graph."""
    engine: Engine = "torch"
    auto: bool = False
    """Whether the planner chooses the axes."""

    def __post_init__(self) -> None:
        strategy_rules.check(self)
        object.__setattr__(self, "axes", normalised(self.axes))

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read comma-separated terms, such as `fsdp,tp=2,bf16`."""
        return cls(**grammar.read_terms(text))

    def __str__(self) -> str:
        return grammar.show_terms(self)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html.terms(str(self))

    def to_json(self) -> str:
        """The canonical text, which is lossless."""
        return str(self)

    @classmethod
    def from_json(cls, value: str) -> Strategy:
        return cls.parse(value)

    def resolve(self, ranks: int) -> Strategy:
        """The strategy with its data axis named and sized for `ranks`; `Refused` if sizes do not multiply to them."""
        if ranks < 1:
            raise Refused(f"{self} was given {ranks} ranks; give it at least 1.")
        if self.auto:
            raise Refused(f"{self} has no axes yet; let the planner choose them, or name a strategy such as ddp.")
        if self.traits.alone:
            if ranks == 1:
                return self
            raise Refused(f"{self} runs on 1 rank, but {ranks} were given; ddp is the simplest strategy for {ranks}.")
        if not _fits(self.model_ranks, self.data_size, ranks):
            raise Refused(_misfit(self, ranks))
        left = ranks // self.model_ranks
        summed = left * self.batch_splits > 1 or any(term.traits.shares_gradients for term in self.axes)
        if not summed and self.reduce != "fp32":
            raise Refused(f"{self} leaves one data rank, which has nothing to sum; drop reduce={self.reduce}.")
        if self.data is not None:
            return replace(self, data_size=left)
        if summed:
            return replace(self, data="ddp", data_size=left)
        # If the model's axes take every rank, a data axis of one rank would only add a name.
        return self if self.model_ranks > 1 else replace(self, data="single")

    @property
    def traits(self) -> DataTraits:
        """Facts about its data axis."""
        return find_traits(self.data, self.variant)

    @property
    def number_format(self) -> NumberFormat:
        return FORMATS[self.precision]

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced to their shards after each micro-batch, and not once a step.

        Whole gradients are reduced once: a sum of several costs no more memory.
        """
        return self.sync == "each" and "gradients" in self.traits.shards

    @property
    def model_ranks(self) -> int:
        """Ranks that one copy of the model is divided over."""
        return prod(term.size for term in self.axes)

    @property
    def batch_splits(self) -> int:
        """Data ranks for each rank of the data term: those of the axes that lie inside the data axis."""
        return prod(term.size for term in self.axes if term.traits.splits_batch)

    @property
    def stage_axis(self) -> AxisTerm | None:
        """The axis that cuts the model into stages, such as a pipeline."""
        return next((term for term in self.axes if term.traits.staged), None)

    @property
    def stage_ranks(self) -> int:
        return self.stage_axis.size if self.stage_axis else 1

    @property
    def schedule(self) -> str:
        """The pipeline schedule; "" without stages."""
        return self.stage_axis.schedule if self.stage_axis else ""

    @property
    def inner_axes(self) -> tuple[AxisTerm, ...]:
        """The axes whose ranks run the same layers together, outermost in the mesh first."""
        return tuple(sorted((term for term in self.axes if not term.traits.staged), key=lambda term: term.traits.place))

    @property
    def inner_ranks(self) -> int:
        """Ranks that run the same layers on the same samples."""
        return prod(term.size for term in self.inner_axes if not term.traits.splits_batch)

    def config_sizes(self, framework: str) -> dict[str, int]:
        """The size of each axis that a framework's config has a field for, by field; 1 for a missing axis."""
        sizes = {term.word: term.size for term in self.axes}
        fields = {word: traits.config_fields.get(framework) for word, traits in MODEL_AXES.items()}
        return {field: sizes.get(word, 1) for word, field in fields.items() if field}

    @property
    def splits_activations(self) -> bool:
        """Whether a rank computes parts of activations between layers."""
        return any(term.traits.splits_activations for term in self.axes)

    @property
    def splits_tensors(self) -> bool:
        """Whether a rank holds parts of parameters."""
        return any(term.traits.splits_tensors for term in self.axes)

    @property
    def data_ranks(self) -> int:
        """Ranks with different samples: those of the data term and of the axes inside the data axis; 1 without one."""
        if not self.traits.sized:
            return 1
        if self.data_size is None:
            raise ValueError(f"{self} has no size on its data axis yet; call resolve(ranks) first.")
        return self.data_size * self.batch_splits

    @property
    def reduced_ranks(self) -> int:
        """Ranks whose gradients are summed: those of the data axis and of axes whose ranks compute shares."""
        return self.data_ranks * prod(term.size for term in self.axes if term.traits.shares_gradients)

    @property
    def shards(self) -> int:
        """Ranks that the data axis shards over; 1 if it only replicates."""
        return self.data_ranks // self.replicas

    @property
    def replicas(self) -> int:
        """Copies of what the data axis shards; `replicas * shards == data_ranks`."""
        if self.hsdp_replicas is not None:
            return self.hsdp_replicas
        return 1 if self.traits.shards else self.data_ranks

    @property
    def state_shards(self) -> int:
        """Ranks that sharded state is divided over: `shards`, and the ranks of axes whose gradients are summed too."""
        return self.reduced_ranks // self.replicas if self.traits.shards else 1


def _misfit(strategy: Strategy, ranks: int) -> str:
    least = strategy.model_ranks * (strategy.data_size or 1)
    need = f"{least} ranks" if strategy.data_size else f"a multiple of {least} ranks"
    given = "1 was given" if ranks == 1 else f"{ranks} were given"
    fits = [*_data_terms(strategy, ranks), *_model_terms(strategy, ranks)][:_SHOWN]
    advice = f"{either(fits)} would fit" if fits else f"give it {need}, or change more than one size"
    return f"{strategy} needs {need}, but {given}; {advice}."


def _data_terms(strategy: Strategy, ranks: int) -> list[str]:
    """Data axes that would fill the ranks that the model's axes leave, nearest size first."""
    left, over = divmod(ranks, strategy.model_ranks)
    if over or strategy.data_size is None:
        return []
    if strategy.hsdp_replicas is None:
        return [grammar.show_data(replace(strategy, data_size=left))]
    replicas = _nearest_first(divisors(left), strategy.hsdp_replicas)
    return [grammar.show_data(replace(strategy, data_size=left, hsdp_replicas=number)) for number in replicas]


def _model_terms(strategy: Strategy, ranks: int) -> list[str]:
    """Sizes of one model axis that would fit if all others stay; size 1 only if no other fits."""
    terms = []
    for axis in strategy.axes:
        others = strategy.model_ranks // axis.size
        fits = [n for n in divisors(ranks) if _fits(others * n, strategy.data_size, ranks)]
        split = [n for n in fits if n > 1] or fits
        terms += [f"{axis.word}={n}" for n in _nearest_first(split, axis.size)]
    return terms


def _fits(model_ranks: int, data_size: int | None, ranks: int) -> bool:
    left, over = divmod(ranks, model_ranks)
    return not over and data_size in (None, left)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest_first(sizes: list[int], wanted: int) -> list[int]:
    return sorted(sizes, key=lambda size: (abs(size - wanted), size))
