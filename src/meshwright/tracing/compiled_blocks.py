"""What compiling makes of a model's blocks: what they keep for backward, and their kernels in a model compiled whole.

Of a model without repeated blocks, the whole step is measured, at two numbers of samples.

A compiler fuses kernels and recomputes cheap results, and a library may take another path when it is compiled:
transformers makes masks that it leaves out otherwise, and then attention takes another kernel. So both are measured for
each model, from compiled steps with few blocks and few samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import nn

from meshwright.facts.compiled_blocks import CompiledBlocks, CompiledModel, CompiledMoment
from meshwright.facts.costs import Kernel, ModelCosts, UnitCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import Strategy
from meshwright.tracing.block_stack import BlockStack, find_period, find_repeated_blocks, whole_periods
from meshwright.tracing.costs import affine, affine_kernel
from meshwright.tracing.extrapolate import if_shorter_runs, with_fewer_blocks
from meshwright.tracing.memory import CUBLAS
from meshwright.tracing.meter import OperatorRun
from meshwright.tracing.record_step import Recorded, StepObserver, record_step
from meshwright.tracing.recorder import StepRecorder
from meshwright.tracing.step import SIZES_COMPILED, refuse_trace
from meshwright.tracing.unit_recorder import LOSS

SAMPLES = (11, 13)
"""Their tokens are seldom as many as a layer is wide, for then sums over tokens and over features would look alike."""
MORE_SAMPLES = 47
"""For a model without repeated blocks: what it holds also without samples, such as a library's workspace, drops out."""
APART = 2
"""Ranks of a step whose blocks are compiled one by one, as data strategies compile them."""
TIMES = (25, 5, 1)
"""How many times these are taken, if the batch is large: the allocator rounds small tensors up by more."""


def measure_compiled_blocks(job: Job, facts: ModelFacts, costs: ModelCosts) -> CompiledBlocks:
    """Trace compiled steps of one process; all of the model, if it repeats no blocks."""
    strategy = refuse_trace(job, facts, Strategy.parse(f"single,{costs.precision},compile"), 1, "cuda")
    repeated = _find_repeated(job, facts)
    if repeated is not None:
        found = if_shorter_runs(lambda: _of_blocks(job, facts, costs, strategy, repeated))
        if found is not None:
            return found
    sizes = _sizes(job, SAMPLES[0], MORE_SAMPLES)
    less, most = (_trace(job, facts, strategy, samples) for samples in sizes)
    kept = _share(most.held - less.held, _units(costs), sizes[1] - sizes[0])
    return CompiledBlocks(kept=kept, model=_model(less, most, sizes))


def measure_blocks_apart(job: Job, facts: ModelFacts, costs: ModelCosts, known: CompiledBlocks) -> CompiledBlocks:
    """What is known, with what blocks keep if each is compiled by itself."""
    strategy = refuse_trace(job, facts, Strategy.parse(f"ddp,{costs.precision},compile"), APART, "cuda")
    repeated = _find_repeated(job, facts)
    if repeated is not None:
        found = if_shorter_runs(lambda: _kept_apart(job, facts, costs, strategy, repeated))
        if found is not None:
            return replace(known, kept_apart=found)
    sizes = _sizes(job, SAMPLES[0], MORE_SAMPLES)
    less, most = (_trace(job, facts, strategy, samples, APART) for samples in sizes)
    kept = _share(most.held - less.held, _units(costs), sizes[1] - sizes[0])
    return replace(known, kept_apart=kept, moments_apart=_moments(less, most, sizes))


@dataclass(frozen=True)
class _Repeated:
    """The blocks that a model repeats, and two smaller numbers of them."""

    stack: BlockStack
    few: int
    more: int

    def added(self, costs: ModelCosts) -> list[UnitCosts]:
        """The eager blocks that the larger number has more."""
        count, name = self.stack.blocks, self.stack.name
        ends = [f"{name}.{place}" for place in range(count - self.more + self.few, count)]
        return [unit for unit in costs.units if unit.name in ends]


def _find_repeated(job: Job, facts: ModelFacts) -> _Repeated | None:
    stack = find_repeated_blocks(facts)
    period = find_period(job, stack) if stack is not None and not stack.before else None
    if stack is None or period is None:
        return None
    few, more = whole_periods(SIZES_COMPILED, period)
    return _Repeated(stack, few, more) if stack.blocks >= more else None


def _sizes(job: Job, few: int, more: int) -> tuple[int, int]:
    """Two numbers of samples, as many times these as the batch allows."""
    times = next((n for n in TIMES if 4 * n * more <= job.global_batch), 1)
    return times * few, times * more


def _units(costs: ModelCosts) -> list[UnitCosts]:
    return [unit for unit in costs.units if unit.name != LOSS]


def _of_blocks(
    job: Job, facts: ModelFacts, costs: ModelCosts, strategy: Strategy, repeated: _Repeated
) -> CompiledBlocks:
    """One block, from steps with fewer and more of them, and with more samples."""
    sizes = _sizes(job, *SAMPLES)
    small, large, wide = (
        _trace_blocks(job, facts, strategy, repeated, blocks, samples)
        for blocks, samples in ((repeated.few, sizes[0]), (repeated.more, sizes[0]), (repeated.more, sizes[1]))
    )
    kept = _share(large.kept - small.kept, repeated.added(costs), sizes[0])
    runs = [(small.runs[way], large.runs[way], wide.runs[way]) for way in _WAYS]
    forward, backward = (_added_kernels(*own, repeated.more - repeated.few, sizes) for own in runs)
    if not (forward and backward):
        return CompiledBlocks(kept=kept)
    return CompiledBlocks(kept=kept, forward=forward, backward=backward)


def _kept_apart(job: Job, facts: ModelFacts, costs: ModelCosts, strategy: Strategy, repeated: _Repeated) -> float:
    samples, _ = _sizes(job, *SAMPLES)
    small, large = (
        _trace_blocks(job, facts, strategy, repeated, blocks, samples, APART)
        for blocks in (repeated.few, repeated.more)
    )
    return _share(large.kept - small.kept, repeated.added(costs), samples)


_WAYS = ("forward", "backward")


@dataclass
class _CompiledStep(StepObserver):
    """Notes the kernels of compiled code in the recorded step."""

    runs: dict[str, list[OperatorRun]] = field(default_factory=lambda: {way: [] for way in _WAYS})
    kept: float = 0.0
    """The most bytes of activations at any moment, without the low-precision copies of the parameters."""
    held: float = 0.0
    """The same with what forward frees itself, such as the parts of a sum over all layers."""
    moments: dict[str, Counter[str]] = field(default_factory=dict)
    """What is held at each moment's peak, by its cause, without those copies and without libraries' workspaces."""
    _is_on: bool = False

    def attach(self, models: Iterable[nn.Module], recorder: StepRecorder) -> None:
        recorder.operations.compiled = self._compiled

    def begin(self) -> None:
        self._is_on = True

    def end(self) -> None:
        self._is_on = False

    def _compiled(self, run: OperatorRun, phase: str) -> None:
        if self._is_on and phase in self.runs:
            self.runs[phase].append(run)


def _trace_blocks(
    job: Job, facts: ModelFacts, strategy: Strategy, repeated: _Repeated, blocks: int, samples: int, ranks: int = 1
) -> _CompiledStep:
    shorter = with_fewer_blocks(replace(job, global_batch=samples), facts, strategy, repeated.stack, blocks)
    assert shorter is not None  # without a pipeline, no stages could lack blocks
    return _trace(shorter.job, shorter.facts, strategy, samples, ranks)


def _trace(job: Job, facts: ModelFacts, strategy: Strategy, samples: int, ranks: int = 1) -> _CompiledStep:
    """`samples` are those of each rank."""
    step = _CompiledStep()
    recorded = record_step(replace(job, global_batch=ranks * samples), facts, strategy, ranks, 0, observer=step)
    copies = _copies(recorded, strategy)
    step.kept = max(causes["activations"] for causes in recorded.peaks.values()) - copies
    forward = [causes for moment, causes in recorded.peaks.items() if moment.startswith("forward")]
    step.held = max([step.kept, *(causes["activations"] + causes["temporary"] - copies for causes in forward)])
    for moment, causes in recorded.peaks.items():
        if moment.startswith(("forward", "loss", "backward")):
            step.moments[moment] = causes - Counter({"activations": round(copies), "temporary": CUBLAS * len(_WAYS)})
    if recorded.uncompiled:  # a part of the step is eager, and not among the kernels
        step.runs = {way: [] for way in _WAYS}
    return step


def _model(less: _CompiledStep, most: _CompiledStep, sizes: tuple[int, int]) -> CompiledModel | None:
    """The whole step from two numbers of samples; None if the compiler fuses otherwise with more samples."""
    ways = []
    for way in _WAYS:
        pairs = list(zip(less.runs[way], most.runs[way], strict=False))
        same = len(less.runs[way]) == len(most.runs[way]) and all(few.name == many.name for few, many in pairs)
        if not (pairs and same):
            return None
        ways.append(tuple(affine_kernel(*pair, sizes) for pair in pairs))
    return CompiledModel(forward=ways[0], backward=ways[1], moments=_moments(less, most, sizes))


def _moments(less: _CompiledStep, most: _CompiledStep, sizes: tuple[int, int]) -> tuple[CompiledMoment, ...]:
    made = max(causes["gradients"] for causes in most.moments.values()) or 1.0
    return tuple(
        CompiledMoment(
            activations=affine(_active(less.moments[name]), _active(causes), sizes),
            gradients=causes["gradients"] / made,
        )
        for name, causes in most.moments.items()
        if name in less.moments
    )


def _active(causes: Counter[str]) -> float:
    return causes["activations"] + causes["temporary"] + causes["logits"]


def _copies(recorded: Recorded, strategy: Strategy) -> float:
    """Bytes of the parameters in low precision."""
    low = FORMATS[strategy.precision].bytes
    return max(causes["parameters"] for causes in recorded.peaks.values()) * low / 4 if low < 4 else 0.0


def _share(kept: float, units: list[UnitCosts], samples: int) -> float:
    eager = sum(unit.kept.at(samples) for unit in units)
    return kept / eager if eager > 0 else 1.0


def _added_kernels(
    small: list[OperatorRun], large: list[OperatorRun], wide: list[OperatorRun], blocks: int, sizes: tuple[int, int]
) -> tuple[Kernel, ...]:
    """The kernels that one more block adds, from those of two models and of the larger one with more samples.

    The larger model has `blocks` more.
    """
    if [run.name for run in large] != [run.name for run in wide]:
        return ()  # the compiler fuses otherwise with more samples
    added = Counter(zip(large, wide, strict=True))
    for run, count in Counter(small).items():
        for pair in [pair for pair in added if pair[0] == run]:
            taken = min(count, added[pair])
            added[pair], count = added[pair] - taken, count - taken
    return tuple(affine_kernel(*pair, sizes) for pair, count in added.items() for _ in range(round(count / blocks)))
