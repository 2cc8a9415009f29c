"""How a step lies over ranks, in numbers: what memory and time are computed from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.planner.hosts import ELSEWHERE, OURS, HostCosts
from meshwright.schedules import FAMILIES
from meshwright.strategies import data_strategy
from meshwright.strategies.pipeline import count_micro_batches, is_pipelined, pipeline_ranks, schedule_name

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A strategy resolved for a world and a batch, or a row of somebody's measurements."""

    data: int = 1
    """Ranks on the data axis."""
    shards: int = 1
    """Ranks that share what is sharded; `data // shards` copies of it."""
    tp: int = 1
    pp: int = 1
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
    """Whether what a tensor axis gathers is held by another stream only, and comes back when memory is short."""
    sequence: bool = True
    """Whether tensor parallelism divides the activations between its layers too."""
    host: HostCosts = ELSEWHERE
    """What the engine's host needs."""

    @property
    def ranks(self) -> int:
        return self.data * self.tp * self.pp

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    @property
    def compute_bytes(self) -> int:
        """Of one element as it is computed with."""
        return ITEMSIZE[self.precision]

    @property
    def gathers(self) -> bool:
        return self.parameters_over > 1


def arrange(strategy: Strategy, facts: ModelFacts, global_batch: int) -> Arrangement:
    """The numbers of a resolved strategy that trains a job on the torch engine."""
    technique = data_strategy(strategy)
    layout, low = technique.layout(strategy), ITEMSIZE[strategy.precision]
    lowered = low < 4 and not strategy.pure
    rest = low if strategy.pure or (lowered and layout.lowered_copy) else 4
    micro_batch, micro_batches = cut_batch(strategy, global_batch)
    plan = facts.tensor_plan
    return Arrangement(
        data=strategy.data_ranks,
        shards=strategy.shards,
        tp=strategy.tp * strategy.op,
        pp=pipeline_ranks(strategy),
        virtual=FAMILIES[schedule_name(strategy)].virtual if is_pipelined(strategy) else 1,
        schedule=schedule_name(strategy) if is_pipelined(strategy) else "",
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
        parameter_bytes=rest,
        gradient_bytes=low if strategy.pure else 4,
        gradients_rest=strategy.data == "ddp" or micro_batches > 1 or is_pipelined(strategy),
        moment_bytes=facts.optimizer_slots * (low if strategy.pure else 4),
        master_bytes=4 if lowered and layout.lowered_copy else 0,
        cast_bytes=low if lowered and not technique.lowers else 0,
        # Under a pipeline a stage stays gathered for the whole step.
        reshards=strategy.data in ("fsdp", "hsdp") and strategy.variant == "" and not is_pipelined(strategy),
        reduce_bytes=low if strategy.pure else 4,
        overlaps=technique.overlaps and not is_pipelined(strategy),
        sequence=plan.sequence if plan is not None else False,
        host=OURS,
    )


def cut_batch(strategy: Strategy, global_batch: int) -> tuple[int, int]:
    """Samples of a micro-batch and how many of them a data rank goes through in one step."""
    samples = -(-global_batch // strategy.data_ranks)
    if is_pipelined(strategy):
        count = count_micro_batches(strategy, global_batch)
        return -(-samples // count), count
    size = min(strategy.micro_batch or samples, samples)
    return size, -(-samples // size)


def rank_of(arrangement: Arrangement, stage: int) -> int:
    """The pipeline rank that a stage lies on."""
    turn, place = divmod(stage, arrangement.pp)
    folds = arrangement.schedule and FAMILIES[arrangement.schedule].placement == "v"
    return arrangement.pp - 1 - place if folds and turn % 2 else place


def stages_of(arrangement: Arrangement) -> tuple[tuple[int, ...], ...]:
    """For each pipeline rank, its stages."""
    return _stages_of(arrangement.pp, arrangement.virtual, arrangement.schedule)


@lru_cache(maxsize=512)
def _stages_of(pp: int, virtual: int, schedule: str) -> tuple[tuple[int, ...], ...]:
    laid = Arrangement(pp=pp, virtual=virtual, schedule=schedule, micro_batch=1, micro_batches=1)
    own: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(pp * virtual):
        own[rank_of(laid, stage)].append(stage)
    return tuple(map(tuple, own))
