"""How a step lies over ranks, in numbers: what memory and time are computed from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import MODEL_AXES
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import AxisTerm, Strategy
from meshwright.planner.host_costs import ELSEWHERE, OURS, HostCosts
from meshwright.schedules import FAMILIES
from meshwright.strategies import data_strategy
from meshwright.strategies.pipeline.sizes import count_micro_batches

MASTER_BYTES = 4
"""Of an element as models are built: fp32."""


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """A strategy resolved for a world and a batch, or a row of somebody's measurements."""

    data: int = 1
    """Ranks on the data axis."""
    shards: int = 1
    """Ranks that share what is sharded; `data // shards` copies of it."""
    inner: tuple[AxisTerm, ...] = ()
    """The axes whose ranks run the same layers together, from the outermost to the innermost."""
    stage_ranks: int = 1
    """Ranks of the pipeline."""
    virtual: int = 1
    """Stages on each pipeline rank."""
    schedule: str = ""
    micro_batch: int
    micro_batches: int
    precision: str = "bf16"
    recompute: str = "none"
    compile: bool = False
    offload: str = ""
    parameters_over: int = 1
    """Over how many ranks the resting parameters are divided; likewise the next two."""
    gradients_over: int = 1
    optimizer_over: int = 1
    parameter_bytes: int = 4
    """Of one element at rest; likewise the next two."""
    gradient_bytes: int = 4
    gradients_rest: bool = True
    """Whether gradients have their memory all the time; else they come as backward goes and go with the update."""
    beside_bytes: int = 0
    """A micro-batch's own gradient that stays beside the sum of all."""
    moment_bytes: float = 8.0
    """The optimizer's state for one element."""
    master_bytes: int = 0
    """A copy of the parameters that lies with the optimizer."""
    cast_bytes: int = 0
    """A copy of the parameters in the compute dtype that lives from forward to backward."""
    reshards: bool = False
    """Whether gathered parameters are let go after forward and gathered again."""
    reduce_bytes: int = 4
    """Of one element of a gradient on its way between ranks."""
    overlaps: bool = True
    """Whether gradients travel while backward runs."""
    elastic: bool = False
    """Whether what inner axes gather is held by another stream only, and comes back when memory is short."""
    sequence: bool = True
    """Whether inner axes that can divide the activations between layers do so; not every engine does."""
    one_process: bool = False
    """Whether one process has all devices of the data axis: their outputs meet on the first, and each micro-batch
    sends parameters and gradients."""
    host: HostCosts = ELSEWHERE
    """What the engine's host needs."""

    @property
    def ranks(self) -> int:
        return self.data * self.inner_ranks * self.stage_ranks

    @cached_property
    def inner_ranks(self) -> int:
        return prod(term.size for term in self.inner)

    @property
    def stages(self) -> int:
        return self.stage_ranks * self.virtual

    @property
    def compute_bytes(self) -> int:
        """Of one element as it is computed with."""
        return FORMATS[self.precision].bytes

    @property
    def gathers(self) -> bool:
        return self.parameters_over > 1


def inner_causes() -> tuple[str, ...]:
    """The causes of time that inner axes have: the names of their mesh axes."""
    return tuple(dict.fromkeys(traits.mesh_name for traits in MODEL_AXES.values() if not traits.staged))


def lay_out_step(strategy: Strategy, facts: ModelFacts, global_batch: int) -> StepLayout:
    """The numbers of a resolved strategy that trains a job on the torch engine."""
    technique = data_strategy(strategy)
    layout, traits = technique.layout(strategy), strategy.traits
    low, update_bytes = strategy.number_format.bytes, layout.update_bytes or MASTER_BYTES
    micro_batch, micro_batches = cut_batch(strategy, global_batch)
    stage = strategy.stage_axis
    return StepLayout(
        data=strategy.data_ranks,
        shards=strategy.shards,
        inner=strategy.inner_axes,
        stage_ranks=stage.size if stage else 1,
        virtual=FAMILIES[stage.schedule].virtual if stage else 1,
        schedule=stage.schedule if stage else "",
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        precision=strategy.precision,
        recompute=strategy.recompute,
        compile=strategy.compile,
        offload=strategy.offload,
        parameters_over=layout.parameters,
        # Gradients travel once a step: until the last micro-batch every rank sums its own, whole.
        gradients_over=layout.gradients if micro_batches == 1 else 1,
        optimizer_over=layout.optimizer,
        parameter_bytes=layout.parameter_bytes or MASTER_BYTES,
        gradient_bytes=update_bytes,
        gradients_rest=traits.gradients_rest or micro_batches > 1 or stage is not None,
        moment_bytes=facts.optimizer_slots * update_bytes,
        master_bytes=MASTER_BYTES if layout.masters else 0,
        cast_bytes=low if low < MASTER_BYTES and not strategy.pure and not technique.lowers else 0,
        # Under a pipeline a stage stays gathered for the whole step.
        reshards=traits.reshards and stage is None,
        reduce_bytes=update_bytes,
        overlaps=technique.overlaps and stage is None,
        one_process=traits.many_devices,
        host=OURS,
    )


def cut_batch(strategy: Strategy, global_batch: int) -> tuple[int, int]:
    """Samples of a micro-batch and how many of them a data rank goes through in one step."""
    samples = -(-global_batch // strategy.data_ranks)
    if strategy.stage_axis:
        count = count_micro_batches(strategy, global_batch)
        return -(-samples // count), count
    devices = strategy.data_ranks if strategy.traits.many_devices else 1  # there `mb` counts the process's samples
    size = min(-(-strategy.micro_batch // devices) if strategy.micro_batch else samples, samples)
    return size, -(-samples // size)


def rank_of(step_layout: StepLayout, stage: int) -> int:
    """The pipeline rank that a stage lies on."""
    turn, place = divmod(stage, step_layout.stage_ranks)
    folds = step_layout.schedule and FAMILIES[step_layout.schedule].placement == "v"
    return step_layout.stage_ranks - 1 - place if folds and turn % 2 else place


def stages_of(step_layout: StepLayout) -> tuple[tuple[int, ...], ...]:
    """For each pipeline rank, its stages."""
    return _stages_of(step_layout.stage_ranks, step_layout.virtual, step_layout.schedule)


@lru_cache(maxsize=512)
def _stages_of(ranks: int, virtual: int, schedule: str) -> tuple[tuple[int, ...], ...]:
    laid = StepLayout(stage_ranks=ranks, virtual=virtual, schedule=schedule, micro_batch=1, micro_batches=1)
    own: list[list[int]] = [[] for _ in range(ranks)]
    for stage in range(ranks * virtual):
        own[rank_of(laid, stage)].append(stage)
    return tuple(map(tuple, own))
