"""How a job lies over a cluster: mesh axes with sizes, and policies. A frozen value with a text form.

`Strategy.parse("fsdp,tp=2,bf16").resolve(8)` is `fsdp=4,tp=2,bf16`.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.facts import grammar, soundness
from meshwright.facts.data_axis import DataTraits, find_traits
from meshwright.facts.grammar import Engine, Offload, Recompute, Schedule
from meshwright.facts.precision import FORMATS, NumberFormat
from meshwright.facts.ranks import count_model_ranks, fill_data_axis

__all__ = ["Engine", "Offload", "Recompute", "Schedule", "Strategy"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """`parse(str(strategy)) == strategy`, for every strategy that can be made."""

    data: str | None = None
    """The data axis, a registered word. None: not named; `resolve` makes it ddp where the other axes leave ranks."""
    data_size: int | None = None
    """Ranks on the whole data axis: R times S for hsdp. None: what the other axes leave."""
    hsdp_replicas: int | None = None
    """R of `hsdp=RxS`, and None for every other data axis. Read `replicas` and `shards` instead."""
    variant: str = ""
    """The suffix of the data axis: how much fsdp shards, where "" is everything."""
    tp: int = 1
    """Ranks of tensor parallelism."""
    op: int = 1
    """Ranks of operator-wise parallelism."""
    pp: int = 1
    """Pipeline stages."""
    schedule: Schedule = ""
    """The order of the pipeline's micro-batches; 1f1b where none was named, "" where pp is 1."""
    layers: int = 1
    """Ranks of plain layer-wise placement."""
    precision: str = "fp32"
    """The number format of the computation: one of `facts/precision.py`."""
    pure: bool = False
    """Whether the parameters are in that dtype too, with no fp32 master weights."""
    autocast: bool = False
    """Whether `torch.autocast` chooses each operator's dtype, with parameters in fp32 for everybody."""
    recompute: Recompute = "none"
    """Activations that are computed again in the backward pass: `ac=` in text."""
    offload: Offload = ""
    """What leaves the device."""
    nvme: str = ""
    """The folder of `offload=nvme:DIR`."""
    micro_batch: int | None = None
    """Samples in one micro-batch of one rank: `mb=` in text. None: chosen when the run is built."""
    compile: bool = False
    """Whether torch.compile is used."""
    engine: Engine = "torch"
    """Who runs it."""
    auto: bool = False
    """Whether the planner chooses the axes."""

    def __post_init__(self) -> None:
        soundness.check(self)
        # One stage is no pipeline, so it has no schedule either.
        object.__setattr__(self, "schedule", "" if self.pp == 1 else self.schedule or "1f1b")

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Reads comma-separated terms, as `fsdp,tp=2,bf16`."""
        return cls(**grammar.read_terms(text))

    def __str__(self) -> str:
        return grammar.show_terms(self)

    def to_json(self) -> str:
        """The canonical text: it loses nothing, and a person can read it."""
        return str(self)

    @classmethod
    def from_json(cls, value: str) -> Strategy:
        return cls.parse(value)

    def resolve(self, ranks: int) -> Strategy:
        """The strategy with its data axis named and sized for a world of so many ranks."""
        return fill_data_axis(self, ranks)

    @property
    def traits(self) -> DataTraits:
        """What its data axis is."""
        return find_traits(self.data, self.variant)

    @property
    def number_format(self) -> NumberFormat:
        """What its precision is."""
        return FORMATS[self.precision]

    @property
    def model_ranks(self) -> int:
        """Ranks that one copy of the model is split over by the axes other than data."""
        return count_model_ranks(self)

    @property
    def data_ranks(self) -> int:
        """Ranks on the data axis; 1 where there is none."""
        if not self.traits.sized:
            return 1
        if self.data_size is None:
            raise ValueError(f"{self} has no size on its data axis yet; call resolve(ranks) first.")
        return self.data_size

    @property
    def shards(self) -> int:
        """Ranks that share out what the data axis shards; 1 where it only replicates."""
        return self.data_ranks // self.replicas

    @property
    def replicas(self) -> int:
        """Copies of what the data axis shards; `replicas * shards == data_ranks`."""
        if self.hsdp_replicas is not None:
            return self.hsdp_replicas
        return 1 if self.traits.shards else self.data_ranks
