"""The numbers of a distributed step from which memory and time are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import MODEL_AXES
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import AxisTerm, Strategy
from meshwright.planner.host_costs import OTHER_ENGINES, OURS, HostCosts
from meshwright.schedules import FAMILIES
from meshwright.strategies import data_strategy
from meshwright.strategies.pipeline.sizes import count_micro_batches

MASTER_BYTES = 4
"""Bytes per element of the parameters as models are built: fp32."""

BUCKET = 25e6
"""Bytes of one of DDP's gradient buckets, before they are rounded to be sent."""
FIRST_BUCKET = 2**20
"""Bytes of the first one, which is smaller so that sending starts early."""


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """A strategy resolved for a number of ranks and a batch, or a measured run of another engine."""

    data: int = 1
    """Ranks on the data axis."""
    shards: int = 1
    """Ranks that sharded state is divided over; there are `reduced // shards` copies of it."""
    inner: tuple[AxisTerm, ...] = ()
    """The axes whose ranks run the same layers together, outermost first."""
    stage_ranks: int = 1
    virtual: int = 1
    """Stages on each pipeline rank."""
    schedule: str = ""
    micro_batch: int
    micro_batches: int
    precision: str = "bf16"
    recompute: str = "none"
    compile: bool = False
    compiles_whole: bool = True
    """Whether the model is compiled as one, and not block by block with eager code around them."""
    compiles_loss: bool = True
    """Whether the loss is compiled together with the cast of its inputs, as ours is."""
    graphs: bool = False
    """Whether each micro-batch's forward and backward is one launch of a CUDA graph."""
    pieced: bool = False
    """Whether the output layer and the loss run in pieces."""
    offload: str = ""
    parameters_over: int = 1
    """Number of ranks that parameters are sharded over between uses; the next two likewise."""
    gradients_over: int = 1
    optimizer_over: int = 1
    parameter_bytes: int = 4
    """Bytes per element between uses; the next one likewise."""
    gradient_bytes: int = 4
    gradients_rest: bool = True
    """Whether gradients keep their memory; otherwise backward allocates it and the update frees it."""
    beside_bytes: float = 0.0
    """Bytes per element of a micro-batch's gradients, and of buckets to send them, besides the accumulated sum."""
    moment_bytes: float = 8.0
    """Bytes per element of optimizer state."""
    master_bytes: int = 0
    """Bytes per element of the optimizer's copy of the parameters."""
    cast_bytes: int = 0
    """Bytes per element of a copy of the parameters in the compute dtype, for forward and backward."""
    reshards: bool = False
    """Whether gathered parameters are freed after forward and gathered again for backward."""
    reduce_bytes: int = 4
    """Bytes per element of a gradient in communication."""
    reduces_each: bool = False
    """Whether gradients are reduced to their shards after each micro-batch, not once a step."""
    overlaps: bool = True
    """Whether gradient communication overlaps with backward."""
    sums_ties_whole: bool = False
    """Whether the gradients of a parameter that several stages hold are summed whole, even if ranks shard updates."""
    elastic: bool = False
    """Whether the inputs that inner axes gather are held only by another stream, which returns them under pressure."""
    sequence: bool = True
    """Whether inner axes also divide the activations between layers (sequence parallelism)."""
    one_process: bool = False
    """Whether one process drives all devices of the data axis: outputs are gathered on the first, and each micro-batch
    sends parameters and gradients."""
    host: HostCosts = OTHER_ENGINES

    @property
    def ranks(self) -> int:
        return self.data * self.inner_ranks * self.stage_ranks

    @cached_property
    def reduced(self) -> int:
        """Ranks whose gradients are summed: those of the data axis, and of inner axes that leave it to that."""
        return self.data * prod(term.size for term in self.inner if term.traits.shares_gradients)

    @cached_property
    def inner_ranks(self) -> int:
        """Ranks that run the same layers on the same samples."""
        return prod(term.size for term in self.inner if not term.traits.splits_batch)

    @cached_property
    def batch_splits(self) -> int:
        """Ranks of the axes that lie inside the data axis."""
        return prod(term.size for term in self.inner if term.traits.splits_batch)

    def per_rank(self, elements: float, inside: float, over: int) -> float:
        """Elements of a state that is sharded over `over` data ranks, of which a rank of the inner axes has `elements`.

        `inside` of them are divided by axes inside the data axis already, so fewer ranks are left to shard them.
        """
        return elements if over == 1 else (elements + inside * (min(over, self.batch_splits) - 1)) / over

    @property
    def stages(self) -> int:
        return self.stage_ranks * self.virtual

    @property
    def samples(self) -> int:
        """Samples of one step, over all data ranks and micro-batches."""
        return self.data * self.micro_batch * self.micro_batches

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in the compute dtype."""
        return FORMATS[self.precision].bytes

    @property
    def gathers(self) -> bool:
        return self.parameters_over > 1


def inner_causes() -> tuple[str, ...]:
    """The causes of time for inner axes' communication: the names of their mesh axes."""
    return tuple(dict.fromkeys(traits.mesh_name for traits in MODEL_AXES.values() if not traits.staged))


def lay_out_step(strategy: Strategy, facts: ModelFacts, global_batch: int) -> StepLayout:
    """The step layout of a resolved strategy on the torch engine."""
    technique = data_strategy(strategy)
    layout, traits = technique.layout(strategy), strategy.traits
    low, update_bytes = strategy.number_format.bytes, layout.update_bytes or MASTER_BYTES
    micro_batch, micro_batches = cut_batch(strategy, global_batch)
    stage = strategy.stage_axis
    return StepLayout(
        data=strategy.data_ranks,
        shards=strategy.state_shards,
        inner=strategy.inner_axes,
        stage_ranks=stage.size if stage else 1,
        virtual=FAMILIES[stage.schedule].virtual if stage else 1,
        schedule=stage.schedule if stage else "",
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        precision=strategy.precision,
        recompute=strategy.recompute,
        compile=strategy.compile,
        compiles_whole=stage is None and not technique.compiles_blocks(strategy),
        graphs=strategy.graphs,
        pieced=strategy.loss == "pieced",
        offload=strategy.offload,
        parameters_over=layout.parameters,
        # If they are reduced once a step, every rank accumulates whole ones until then.
        gradients_over=layout.gradients if micro_batches == 1 or strategy.reduces_each else 1,
        optimizer_over=layout.optimizer,
        parameter_bytes=layout.parameter_bytes or MASTER_BYTES,
        gradient_bytes=update_bytes,
        gradients_rest=traits.gradients_rest or micro_batches > 1 or stage is not None or strategy.graphs,
        moment_bytes=facts.optimizer_slots * update_bytes,
        master_bytes=MASTER_BYTES if layout.masters else 0,
        cast_bytes=low if low < MASTER_BYTES and not strategy.pure and not technique.lowers else 0,
        # Under a pipeline a stage stays gathered for the whole step.
        reshards=traits.reshards and stage is None,
        reduce_bytes=update_bytes if strategy.reduce == "fp32" else FORMATS[strategy.reduce].bytes,
        reduces_each=strategy.reduces_each,
        overlaps=technique.overlaps and stage is None and not strategy.graphs and not _sums_afterwards(strategy),
        one_process=traits.many_devices,
        host=OURS,
    )


def _sums_afterwards(strategy: Strategy) -> bool:
    """Whether gradients wait for the end of backward, because not all are summed over the same ranks."""
    return strategy.batch_splits > 1 and not strategy.traits.gathers


def cut_batch(strategy: Strategy, global_batch: int) -> tuple[int, int]:
    """Samples per micro-batch, and micro-batches per step, of one data rank."""
    samples = -(-global_batch // strategy.data_ranks)
    if strategy.stage_axis:
        count = count_micro_batches(strategy, global_batch)
        return -(-samples // count), count
    # With many devices, `mb` counts the samples of the process.
    devices = strategy.data_ranks if strategy.traits.many_devices else 1
    size = min(-(-strategy.micro_batch // devices) if strategy.micro_batch else samples, samples)
    return size, -(-samples // size)


def stages_of(step_layout: StepLayout) -> tuple[tuple[int, ...], ...]:
    """For each pipeline rank, its stages."""
    return _stages_of(step_layout.stage_ranks, step_layout.virtual, step_layout.schedule)


@lru_cache(maxsize=512)
def _stages_of(ranks: int, virtual: int, schedule: str) -> tuple[tuple[int, ...], ...]:
    folds = schedule and FAMILIES[schedule].placement == "v"
    own: list[list[int]] = [[] for _ in range(ranks)]
    for stage in range(ranks * virtual):
        turn, place = divmod(stage, ranks)
        own[ranks - 1 - place if folds and turn % 2 else place].append(stage)
    return tuple(map(tuple, own))
