"""The numbers of a distributed step from which memory and time are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import MODEL_AXES
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import AxisTerm, Strategy
from meshwright.schedules import FAMILIES
from meshwright.strategies import data_strategy
from meshwright.strategies.pipeline.sizes import count_micro_batches

MASTER_BYTES = 4
"""Bytes per element of the parameters as models are built: fp32."""

BUCKET = 25e6
"""Bytes of one of DDP's gradient buckets, before they are rounded to be sent."""


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Host seconds of one engine.

    Python, autograd and the engine launch each kernel, and a device waits if they are late. Engines differ in this more
    than in anything else, so each `StepLayout` names its engine's costs.
    """

    operator: float = 24e-6
    """Added to each launch in eager mode. A step of a GPT of 24 layers under ddp,bf16 takes 54.6 ms on an H200, which
    would compute it in 30 (docs/data/gpu_check.json): some 1,400 operators at 30 us, and 9 ms."""
    step: float = 6e-3
    """Once per step, while the device waits: reading the loss and the norm, starting the optimizer (same rows)."""
    step_of_graphs: float = 2e-3
    """The same if a CUDA graph runs the passes: the host is done before the device. A GPT of 10M parameters takes
    6.8 ms on an H200 (docs/data/host_gaps.json), and its kernels 4.7 by this forecast. Fitted to this one row."""
    shard: float = 1.1e-3
    """For gathering or reducing one block's parameters, in FSDP2 and our ZeRO: the same step takes 99 ms under zero1,
    112 under fsdp:grad-op and 143 under fsdp, with 50, 50 and 75 of them."""
    collective: float = 300e-6
    """For a collective that compute waits for. On H100 nodes under nanotron (ultra-scale playbook), a decoder block
    with a tensor axis takes 4.4 to 4.8 ms however narrow it is: its eight collectives, apart from the launches."""
    stall: float = 260e-6
    """Added to each collective of a tensor axis for each of its ranks if a pipeline's neighbours are on other nodes:
    hosts that wait for the network arrive late, and a collective waits for the last one (same sweep)."""
    neighbour: float = 300e-6
    """For receiving a micro-batch's activations or gradients and sending the results on, in PyTorch's pipeline runtime:
    two batched sends and receives."""
    divided: tuple[float, float] = (0.0, 0.0)
    """Added to each launch, in forward and in backward, of a unit that a tensor axis divides and that has no program:
    what is outside of blocks."""
    repeated: float = 0.0
    """For one block that recomputes, besides its launches."""
    selected: float = 0.0
    """Added to each launch of a forward pass, once in forward and once in backward, under selective checkpointing: it
    notes functions, and exchanges what autograd saved."""
    node: float = 1e-6
    """For one kernel of a CUDA graph, in the launch of the whole."""
    gathers_by_copy: bool = False
    """Whether gathered parameters are copied to the place that forward reads, as in FSDP2."""


OTHER_ENGINES = HostCosts()
"""Engines in eager PyTorch with published measurements."""

OURS = HostCosts(
    operator=18e-6,
    shard=0.85e-3,
    collective=100e-6,
    divided=(290e-6, 75e-6),
    repeated=0.4e-3,
    selected=20e-6,
    gathers_by_copy=True,
)
"""Our engine, on an H200's host (docs/data/plan_gpu.json): a Llama of 28 blocks took 381 ms under tp=8, without
programs, whose kernels run 121, and 457 under tp=2; a GPT of 48 blocks 183 ms under fsdp, whose kernels run 119,
and 168 under ac=selective instead of 136 (benchmarks/recompute_cost.py); a ViT of 24 blocks 82 ms under ac=full and 55
without."""


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
    beside_bytes: int = 0
    """Bytes per element of a micro-batch's gradient that is kept besides the accumulated sum."""
    moment_bytes: float = 8.0
    """Bytes per element of optimizer state."""
    master_bytes: int = 0
    """Bytes per element of the optimizer's copy of the parameters."""
    cast_bytes: int = 0
    """Bytes per element of a copy of the parameters in the compute dtype, for forward and backward."""
    casts_each: bool = True
    """Whether each micro-batch casts the parameters that its products read, as autocast does, not one for all."""
    reshards: bool = False
    """Whether gathered parameters are freed after forward and gathered again for backward."""
    reduce_bytes: int = 4
    """Bytes per element of a gradient in communication."""
    reduces_each: bool = False
    """Whether gradients are reduced to their shards after each micro-batch, not once a step."""
    overlaps: bool = True
    """Whether gradient communication overlaps with backward."""
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
        casts_each=strategy.autocast,
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
