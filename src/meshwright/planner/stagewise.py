"""What each pipeline stage computes, keeps and holds, for one micro-batch size and one set of inner axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any

from meshwright.errors import Refused
from meshwright.facts.costs import Kernel, ModelCosts, UnitCosts
from meshwright.facts.hardware import Hardware
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import AxisTerm
from meshwright.planner import kernels
from meshwright.planner.arrangement import Arrangement
from meshwright.planner.collectives import seconds
from meshwright.strategies import inner_axis
from meshwright.strategies.division import Division, Sent, UnitShare
from meshwright.strategies.stages import Stages, cut_stages

MET = 1.8
"""Micro-batches of a pipeline's first stage whose gathered inputs are back with the allocator when it is fullest: what
another stream gathered returns when the host has met the device, which the first stage does when it first waits for a
gradient (published sweep on H100 nodes: of two in flight hardly any is held twice, of eight nearly all)."""

WIDE = 16
"""Ranks of inner axes from which on that takes longer."""


Inner = tuple[tuple[AxisTerm, ...], bool]
"""The inner axes, and whether they divide the sequence: an arrangement's own."""


@dataclass(frozen=True, kw_only=True)
class UnitLoad:
    """One unit at one micro-batch size, on one rank of the inner axes."""

    name: str
    is_block: bool
    forward: float
    """Seconds on the device."""
    backward: float
    forward_launches: int
    backward_launches: int
    kept: float
    """Bytes; likewise the next three."""
    output: float
    forward_peak: float
    backward_peak: float
    elements: int
    """Elements of the parameters that it reads, its part of those that are divided."""
    trainable: int
    tensors: int
    """How many parameters these are."""
    multiplies: bool
    """Whether products need its parameters again in backward; a table that is looked up is not needed."""
    intercepted: bool
    """Whether an inner axis looks into each of its operators on the host."""
    sent: tuple[tuple[tuple[Sent, ...], tuple[Sent, ...]], ...] = field(hash=False)
    """For each inner axis: what it sends in forward, and in backward."""


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """Consecutive units on one stage."""

    units: tuple[UnitLoad, ...]
    elements: int
    """Of all parameters that the stage holds, each once."""
    trainable: int
    tensors: int
    output: float
    """Bytes of what crosses to the next stage, from one rank."""

    @cached_property
    def counted(self) -> tuple[tuple[UnitLoad, int], ...]:
        """Units that are alike once, with how often they come."""
        counts: dict[int, list[Any]] = {}
        for unit in self.units:
            counts.setdefault(id(unit), [unit, 0])[1] += 1
        return tuple((unit, times) for unit, times in counts.values())

    @cached_property
    def kept(self) -> float:
        return sum(unit.kept for unit in self.units)

    @cached_property
    def cast(self) -> tuple[int, int, int]:
        """Elements that are cast for a micro-batch and kept for its backward: around the blocks, in all, in one."""
        around = sum(unit.elements for unit in self.units if unit.multiplies and not unit.is_block)
        blocks = [unit.elements for unit in self.units if unit.multiplies and unit.is_block]
        return around, sum(blocks), max(blocks, default=0)

    @cached_property
    def climb(self) -> float:
        """Bytes at the fullest moment of one micro-batch's forward and backward, over what others keep."""
        before, peak = 0.0, 0.0
        for unit in self.units:
            peak = max(peak, before + unit.forward_peak, before + unit.backward_peak)
            before += unit.kept
        return max(peak, before)

    @cached_property
    def logits(self) -> float:
        """The part of `climb` that the loss takes, on the stage that has it."""
        last = self.units[-1] if self.units else None
        return max(last.forward_peak, last.backward_peak) if last is not None and not last.elements else 0.0


class Loads:
    """Stages of one model, made once and asked for often."""

    def __init__(
        self,
        facts: ModelFacts,
        costs: Mapping[tuple[str, str], ModelCosts],
        hardware: Hardware,
        *,
        by_compute: bool = False,
    ) -> None:
        """`by_compute` cuts as others do: a stage takes calls until it has its share of the computation."""
        self._facts, self._costs, self._hardware = facts, costs, hardware
        self._counts = {name: (p.count, p.trainable and p.used) for p in facts.parameters for name in p.names}
        self._first = {name: p.name for p in facts.parameters for name in p.names}
        self._stages = lru_cache(maxsize=4096)(self._cut)
        self._stream = lru_cache(maxsize=512)(self._flow)
        self._names = {p.name: p.names for p in facts.parameters}
        self.model_flops = lru_cache(maxsize=8)(self._flops)
        self.collective = lru_cache(maxsize=1 << 16)(partial(seconds, hardware=hardware))
        self._divisions = lru_cache(maxsize=64)(self._divide)
        self._holdings = lru_cache(maxsize=512)(self._hold)
        cut = cut_by_compute if by_compute else cut_stages
        self._borders = lru_cache(maxsize=64)(lambda count: cut(facts, count) if count > 1 else None)

    def of(self, arrangement: Arrangement, *, gathered: float = 1.0) -> tuple[StageLoad, ...]:
        """The stages of an arrangement; raises `Refused` where the model cannot be cut so.

        `gathered` is the share of what inner axes gather that is held until backward.
        """
        return self._stages(
            (arrangement.precision, arrangement.recompute),
            arrangement.compile,
            kernels.KEPT_COMPILED if arrangement.compile and arrangement.gathers else 1.0,
            arrangement.micro_batch,
            (arrangement.inner, arrangement.sequence),
            arrangement.stages,
            gathered,
        )

    def _flops(self, precision: str) -> float:
        """Of forward and backward for one sample, without recomputing."""
        plain = self._costs.get((precision, "none")) or next(iter(self._costs.values()))
        return plain.flops(1)

    def _cut(
        self,
        policy: tuple[str, str],
        compiled: bool,
        keeps: float,
        micro_batch: int,
        inner: Inner,
        stages: int,
        whole: float,
    ) -> tuple[StageLoad, ...]:
        units = self._costs[policy].units
        made: dict[str, UnitLoad] = {}
        for unit in units:
            if unit.like not in made:
                made[unit.like] = self._load(policy, unit, compiled, keeps, micro_batch, inner, whole)
        loads = [made[unit.like] for unit in units]
        if compiled:
            loads[-1] = _fused_loss(loads[-1], loads[-2].output)
        cut = self._borders(stages)
        if cut is None:
            groups = [range(len(loads))]
        else:
            groups = [cut.calls_of(stage) for stage in range(stages)]
            groups[-1] = range(groups[-1].start, len(loads))
        boundary = prod(division.boundary_parts for division in self._divisions(inner))
        return tuple(
            StageLoad(
                units=tuple(loads[i] for i in group),
                elements=elements,
                trainable=trainable,
                tensors=tensors,
                output=loads[group[-1]].output / boundary if group else 0.0,
            )
            for group, (elements, trainable, tensors) in zip(groups, self._holdings(inner, stages), strict=True)
        )

    def _divide(self, inner: Inner) -> tuple[Division, ...]:
        """How each inner axis divides the model."""
        terms, sequence = inner
        found = (inner_axis(term).division(self._facts, term.size) for term in terms)
        return tuple(division if sequence else division.without_sequence() for division in found)

    def _hold(self, inner: Inner, stages: int) -> list[tuple[int, int, int]]:
        """For each stage: elements, those that are trained, and how many parameters they are."""
        calls, cut = self._facts.calls, self._borders(stages)
        groups = [cut.calls_of(stage) for stage in range(stages)] if cut else [range(len(calls))]
        names = [{self._first[name] for i in group for name in calls[i].reads} for group in groups]
        return [(*self._held(own, inner), len(own)) for own in names]

    def _held(self, names: set[str], inner: Inner) -> tuple[int, int]:
        """Elements on one rank of the inner axes, and those of them that are trained."""
        elements = trainable = 0
        for name in names:
            count, trained = self._counts[name]
            part = count // prod(division.parts_of(self._names[name]) for division in self._divisions(inner))
            elements += part
            trainable += part if trained else 0
        return elements, trainable

    def _load(
        self,
        policy: tuple[str, str],
        unit: UnitCosts,
        compiled: bool,
        keeps: float,
        micro_batch: int,
        inner: Inner,
        whole: float,
    ) -> UnitLoad:
        stream = self._stream(policy, micro_batch)
        shares = [division.share(unit, micro_batch, stream) for division in self._divisions(inner)]
        parts = prod(share.parts for share in shares)
        elements, trainable = self._held({self._first[name] for name in unit.parameters}, inner)
        forward, backward = (
            sum(
                kernels.seconds(kernel, micro_batch, _kernel_parts(kernel, shares), self._hardware, compiled)
                for kernel in part
            )
            for part in (unit.forward, unit.backward)
        )
        # Blocks that recompute gather their inputs again.
        regathers = unit.is_block and policy[1] == "none"
        gathered = whole * sum(share.regathered * share.parts / parts for share in shares) if regathers else 0.0
        kept = unit.kept.at(micro_batch) / parts + gathered
        saved = kept * (1 - keeps) if unit.is_block else 0.0
        return UnitLoad(
            name=unit.name,
            is_block=unit.is_block,
            forward=forward,
            backward=backward,
            forward_launches=kernels.launches(unit.forward, compiled),
            backward_launches=kernels.launches(unit.backward, compiled),
            kept=kept - saved,
            output=min(unit.output.at(micro_batch), stream),
            forward_peak=unit.forward_peak.at(micro_batch) / parts + gathered,
            backward_peak=unit.backward_peak.at(micro_batch) / parts + gathered - saved,
            elements=elements,
            trainable=trainable,
            tensors=len(unit.parameters),
            multiplies=any(kernel.kind in ("matmul", "convolution") for kernel in unit.forward),
            intercepted=any(share.intercepted for share in shares),
            sent=tuple(
                (_part_of(share.forward, parts // share.parts), _part_of(share.backward, parts // share.parts))
                for share in shares
            ),
        )

    def _flow(self, policy: tuple[str, str], micro_batch: int) -> float:
        """Bytes that flow from block to block."""
        units = self._costs[policy].units
        sizes = [unit.output.at(micro_batch) for unit in units if unit.is_block]
        return max(sizes or [unit.output.at(micro_batch) for unit in units])


def _kernel_parts(kernel: Kernel, shares: list[UnitShare]) -> int:
    return prod(share.kernel_parts(kernel) if share.kernel_parts else share.parts for share in shares)


def _part_of(sent: tuple[Sent, ...], others: int) -> tuple[Sent, ...]:
    """What one axis sends where other axes divide the activations too."""
    return sent if others == 1 else tuple(replace(each, bytes=each.bytes / others) for each in sent)


def _fused_loss(loss: UnitLoad, gradient: float) -> UnitLoad:
    """A compiled loss writes nothing but the gradient of what it is given, in that dtype."""
    return replace(loss, kept=0.0, forward_peak=0.0, backward_peak=gradient)


def held_twice(arrangement: Arrangement) -> float:
    """The share of gathered inputs that is not back with the allocator where hosts wait; wide axes wait longer."""
    return max(0.1, 1 - MET * max(1.0, arrangement.inner_ranks / WIDE) / arrangement.stages)


def cut_by_compute(facts: ModelFacts, count: int) -> Stages:
    """Stages that go on until they have their share of the computation, as nanotron cuts."""
    total, done, starts = sum(call.flops for call in facts.calls), 0.0, [0]
    for index, call in enumerate(facts.calls):
        done += call.flops
        if len(starts) < count and done >= total * len(starts) / count:
            starts.append(index + 1)
    if len(starts) < count:
        raise Refused(f"{count} stages were asked for, but nothing would be left to compute for the last of them.")
    return Stages(tuple(starts), len(facts.calls))
