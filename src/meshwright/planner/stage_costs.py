"""Time, memory and messages of each pipeline stage, for one micro-batch size and one set of inner axes.

The affine cost model: every size of a traced model is `fixed + each * samples`, so the costs of any micro-batch size
follow without tracing again. A stage sums the costs of its units, divided by its inner axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

from meshwright.errors import Refused
from meshwright.facts.compiled_blocks import CompiledBlocks, CompiledModel, CompiledMoment
from meshwright.facts.costs import Kernel, ModelCosts, UnitCosts
from meshwright.facts.hardware import Hardware
from meshwright.facts.host_passes import HostPasses
from meshwright.facts.model import HeadFacts, ModelFacts, unit_of
from meshwright.facts.pieces import piece_rows
from meshwright.facts.precision import FORMATS
from meshwright.facts.strategy import AxisTerm
from meshwright.planner import kernels
from meshwright.planner.collectives import seconds
from meshwright.planner.launch_costs import launching
from meshwright.planner.measured_kernels import KernelPrices, KernelSeconds
from meshwright.planner.stage_work import StageWork, UnitWork
from meshwright.planner.step_layout import StepLayout
from meshwright.strategies import inner_axis
from meshwright.strategies.model_axis import Division, Sent, UnitShare
from meshwright.strategies.pipeline.stages import Stages, cut_stages

RETURNED = 1.8
"""Micro-batches whose gathered inputs the allocator has back when a pipeline's first stage is fullest. Memory of
another stream returns when the host synchronises with the device, as the first stage does at its first gradient
(published sweep on H100 nodes: with two in flight hardly any input is held twice, with eight nearly all)."""
PIECED = 1.0
"""Time of the elementwise kernels of all pieces, relative to those of a whole loss (H200, 8,192 rows of 128,256 classes
in bf16: 14.7 ms and 14.4 ms besides the products, compiled 5.9 and 5.5)."""
Inner = tuple[tuple[AxisTerm, ...], bool]
"""The inner axes of a step layout, and whether they divide the sequence."""


class _Case(NamedTuple):
    """What the costs of a unit depend on, besides the unit."""

    policy: tuple[str, str]
    """Precision and activation checkpointing."""
    compiled: bool
    compiles_whole: bool
    """Whether the model is compiled as one, so that `CompiledBlocks` tells of its blocks."""
    keeps: float
    """Share of a block's kept activations that remains after compiling."""
    micro_batch: int
    inner: Inner
    gathered: float
    """Share of the inner axes' gathered inputs that is held until backward."""
    pieced: bool = False
    """Whether the output layer and the loss run in pieces."""
    fuses_loss: bool = False
    """Whether the code of the loss is compiled: the job's function, and the model's code if that is compiled whole."""
    gathers: bool = False
    """Whether the data axis gathers parameters, unit by unit if it can."""
    recorded: bool = True
    """Whether inner axes run recorded programs; other engines' code keeps nothing beside."""

    @property
    def divided(self) -> bool:
        """Whether inner axes divide it. Those compile blocks, and nothing around them."""
        return bool(self.inner[0])


class StageCosts:
    """Computes and caches the stages of one model."""

    def __init__(
        self,
        facts: ModelFacts,
        costs: Mapping[tuple[str, str], ModelCosts],
        hardware: Hardware,
        *,
        by_compute: bool = False,
        worst: bool = False,
        prices: KernelPrices | None = None,
        host: Callable[[str], HostPasses | None] = lambda precision: None,
        compiled: Mapping[str, CompiledBlocks] | None = None,
    ) -> None:
        """`by_compute` cuts the stages as nanotron does: each takes calls until it has its share of the FLOPs.

        With `worst`, costs are those of the busiest rank if samples divide the work as unevenly as they can. `prices`
        are those of measured kernels. `host` tells the model's own pass on the cluster's host by precision, if it is
        timed. `compiled` is, by precision, what compiling the model as a whole makes of its blocks.
        """
        self._compiled: Mapping[str, CompiledBlocks] = {} if compiled is None else compiled
        self._worst, self.prices, self.host = worst, prices, host
        self._facts, self._costs, self._hardware = facts, costs, hardware
        self._counts = {name: (p.count, p.trainable and p.used) for p in facts.parameters for name in p.names}
        self._first = {name: p.name for p in facts.parameters for name in p.names}
        self._idle = frozenset(p.name for p in facts.parameters if p.trainable and not p.used)
        self._stages = lru_cache(maxsize=4096)(self._cut)
        self._stream = lru_cache(maxsize=512)(self._flow)
        self._names = {p.name: p.names for p in facts.parameters}
        self.model_flops = lru_cache(maxsize=8)(self._flops)
        self.collective = lru_cache(maxsize=1 << 16)(partial(seconds, hardware=hardware))
        self._divisions = lru_cache(maxsize=64)(self._divide)
        self._holdings = lru_cache(maxsize=512)(self._hold)
        self._ties = lru_cache(maxsize=512)(self._tie)
        self._unit_sizes = lru_cache(maxsize=64)(self._size_units)
        cut = cut_by_compute if by_compute else cut_stages
        self._borders = lru_cache(maxsize=64)(lambda count: cut(facts, count) if count > 1 else None)

    def at_worst(self) -> StageCosts:
        """The same model's costs if samples divide the work as unevenly as they can."""
        return StageCosts(
            self._facts,
            self._costs,
            self._hardware,
            worst=True,
            prices=self.prices,
            host=self.host,
            compiled=self._compiled,
        )

    def of(self, step_layout: StepLayout, *, gathered: float = 1.0) -> tuple[StageWork, ...]:
        """The stages of a step layout; `Refused` if the model cannot be cut into them.

        `gathered` is the share of the inner axes' gathered inputs that is held until backward.
        """
        case = _Case(
            (step_layout.precision, step_layout.recompute),
            step_layout.compile,
            _compiles_whole(step_layout),
            self._kept_share(step_layout),
            step_layout.micro_batch,
            (step_layout.inner, step_layout.sequence),
            gathered,
            step_layout.pieced,
            self._fuses_loss(step_layout),
            gathers=step_layout.gathers,
            recorded=not step_layout.elastic,
        )
        return self._stages(case, step_layout.stages)

    def _kept_share(self, step_layout: StepLayout) -> float:
        """Share of what blocks keep for backward that remains if they are compiled.

        Blocks that recompute keep no cheap results, so that compiling them saves nothing more.
        """
        if not step_layout.compile or step_layout.recompute != "none":
            return 1.0
        known = self._compiled.get(step_layout.precision, CompiledBlocks())
        if step_layout.pieced or not step_layout.compiles_whole:
            return kernels.KEPT_COMPILED if known.kept_apart is None else known.kept_apart
        return 1.0 if step_layout.inner else known.kept

    def _fuses_loss(self, step_layout: StepLayout) -> bool:
        costs = self._costs[step_layout.precision, step_layout.recompute]
        eager = costs.loss_in_model and not step_layout.compiles_whole
        return step_layout.compile and step_layout.compiles_loss and not step_layout.inner and not eager

    def _flops(self, precision: str) -> float:
        """FLOPs of forward and backward for one sample, without recomputation."""
        plain = self._costs.get((precision, "none")) or next(iter(self._costs.values()))
        return plain.flops(1)

    def _cut(self, case: _Case, stages: int) -> tuple[StageWork, ...]:
        units = self._costs[case.policy].units
        made: dict[tuple[Any, ...], UnitWork] = {}
        for unit in units:
            if unit.kind not in made:
                made[unit.kind] = self._unit_work(unit, case)
        work = [made[unit.kind] for unit in units]
        if (model := self._compiled_model(case, stages)) is not None:
            self._compile(work, model, case.micro_batch)
            _hold(work, model.moments, case.micro_batch)
        elif case.pieced and self._facts.head is not None:
            self._piece(work, case, self._facts.head)
        elif case.fuses_loss:
            # Of the unit's costs: the work's output is what a stage would send, at most that of a block.
            work[-1] = _fused_loss(work[-1], units[-2].output.at(case.micro_batch))
        if moments := self._moments_apart(case, stages):
            _hold(work, moments, case.micro_batch)
        cut = self._borders(stages)
        groups = [cut.calls_of(stage) for stage in range(stages)] if cut else [range(len(work))]
        groups[-1] = range(groups[-1].start, len(work))
        boundary = prod(division.boundary_parts for division in self._divisions(case.inner))
        return tuple(
            StageWork(
                units=tuple(work[i] for i in group),
                elements=elements,
                trainable=trainable,
                inside=inside,
                output=work[group[-1]].output / boundary if group else 0.0,
                idle=idle,
            )
            for group, (elements, trainable, inside, idle) in zip(
                groups, self._holdings(case.inner, stages), strict=True
            )
        )

    def _compiled_model(self, case: _Case, stages: int) -> CompiledModel | None:
        """What is known of the whole model as the compiler fuses it."""
        if stages > 1 or not self._compiles_plainly(case):
            return None
        return self._compiled.get(case.policy[0], CompiledBlocks()).model

    def _moments_apart(self, case: _Case, stages: int) -> tuple[CompiledMoment, ...]:
        """What is known of the whole step if blocks are compiled one by one."""
        if stages > 1 or not case.compiled or case.compiles_whole or case.divided or case.pieced:
            return ()
        if case.policy[1] != "none":
            return ()
        return self._compiled.get(case.policy[0], CompiledBlocks()).moments_apart

    def _compile(self, work: list[UnitWork], model: CompiledModel, micro_batch: int) -> None:
        """Change the units' times to shares of the whole model's."""
        passes = [self._seconds(part, micro_batch, [], compiled=False) for part in (model.forward, model.backward)]
        eager = [sum(unit.forward for unit in work) or 1.0, sum(unit.backward for unit in work) or 1.0]
        for place, unit in enumerate(work):
            shares = unit.forward / eager[0], unit.backward / eager[1]
            work[place] = replace(
                unit,
                forward=passes[0].total * shares[0],
                backward=passes[1].total * shares[1],
                forward_launches=round(len(model.forward) * shares[0]),
                backward_launches=round(len(model.backward) * shares[1]),
                host=None,
                kernels=passes[0] * shares[0] + passes[1] * shares[1],
            )

    def _piece(self, work: list[UnitWork], case: _Case, head: HeadFacts) -> None:
        """Change the costs of the output layer and of the loss to those of pieces."""
        units = self._costs[case.policy].units
        place = next((i for i in reversed(range(len(units))) if self._first[head.weight] in units[i].parameters), None)
        if place is None:
            return
        low, wide = FORMATS[case.policy[0]].bytes, 4
        parts = prod(
            division.parts_of(self._names[self._first[head.weight]]) for division in self._divisions(case.inner)
        )
        logits, classes = units[place].output.at(case.micro_batch) / parts, head.classes // parts
        rows = max(1, round(logits / low / classes))
        size = piece_rows(rows, classes)
        weight = classes * head.width
        piece = size * classes * (2 * low if case.compiled else low + wide)
        work[place] = _without_output(work[place], logits)
        # Each piece adds to the gradient of the whole weight.
        added = kernels.moving(-(-rows // size) * weight * 2 * wide, self._hardware)
        kept = weight * wide + rows * head.width * low
        work[-1] = replace(
            work[-1],
            forward=(work[-1].forward + work[-1].backward) * PIECED + added,
            backward=kernels.moving(weight * (wide + low), self._hardware),
            kept=kept,
            forward_peak=kept + piece,
            backward_peak=kept + weight * low,
        )

    def _divide(self, inner: Inner) -> tuple[Division, ...]:
        """How each inner axis divides the model."""
        terms, sequence = inner
        found = (inner_axis(term).division(self._facts, term.size) for term in terms)
        found = (division.at_worst() for division in found) if self._worst else found
        return tuple(division if sequence else division.without_sequence() for division in found)

    def _hold(self, inner: Inner, stages: int) -> list[tuple[int, int, int, int]]:
        """For each stage, its elements, how many of them are trained, are inside the data axis, and are never used."""
        held = self._names_of(stages)
        return [(*self._held(names, inner), self._held(names & self._idle, inner)[0]) for names in held]

    def tied(self, step_layout: StepLayout) -> list[tuple[tuple[int, ...], int, int]]:
        """What several stages hold: these stages, its elements on a rank, and how many are inside the data axis."""
        inner = (step_layout.inner, step_layout.sequence)
        return self._ties(inner, step_layout.stages) if step_layout.stages > 1 else []

    def _tie(self, inner: Inner, stages: int) -> list[tuple[tuple[int, ...], int, int]]:
        holders: dict[str, tuple[int, ...]] = {}
        for stage, names in enumerate(self._names_of(stages)):
            for name in names:
                holders[name] = (*holders.get(name, ()), stage)
        found = []
        for members in sorted({stages for stages in holders.values() if len(stages) > 1}):
            held = {name for name, stages in holders.items() if stages == members}
            _, trainable, inside = self._held(held, inner)
            found.append((members, trainable, inside))
        return found

    def _names_of(self, stages: int) -> list[set[str]]:
        """The parameters that each stage holds: those that it reads, and unread ones of its modules."""
        calls, cut = self._facts.calls, self._borders(stages)
        groups = [cut.calls_of(stage) for stage in range(stages)] if cut else [range(len(calls))]
        held = [{self._first[name] for i in group for name in calls[i].reads} for group in groups]
        for unread in set(self._names).difference(*held):
            inside = (calls[i].name and unread.startswith(f"{calls[i].name}.") for group in groups for i in group)
            owners = (stage for stage, group in enumerate(groups) for _ in group)
            held[next((stage for stage, own in zip(owners, inside, strict=True) if own), 0)].add(unread)
        return held

    def _held(self, names: set[str], inner: Inner) -> tuple[int, int, int]:
        """Elements on one rank of the inner axes, how many of them are trainable, and how many of these are divided by
        an axis inside the data axis."""
        elements = trainable = inside = 0
        for name in names:
            count, trained = self._counts[name]
            parts = [division.parts_of(self._names[name]) for division in self._divisions(inner)]
            part = count // prod(parts)
            elements += part
            trainable += part if trained else 0
            within = any(n > 1 and term.traits.splits_batch for n, term in zip(parts, inner[0], strict=True))
            inside += part if trained and within else 0
        return elements, trainable, inside

    def _by_shard_unit(self, names: set[str], *, gathers: bool) -> dict[str, set[str]]:
        """Parameters by the shard unit that holds them, without those that no unit holds."""
        units = self._facts.gathered_units if gathers else self._facts.shard_units
        found: dict[str, set[str]] = {}
        for name in names:
            if unit := unit_of(name, units):
                found.setdefault(unit, set()).add(name)
        return found

    def _size_units(self, inner: Inner, gathers: bool) -> dict[str, int]:
        """The elements of each shard unit."""
        units = self._by_shard_unit(set(self._names), gathers=gathers)
        return {name: self._held(held, inner)[0] for name, held in units.items()}

    def _unit_work(self, unit: UnitCosts, case: _Case) -> UnitWork:
        # What is outside of blocks that are compiled one by one runs as it is.
        everything = not case.divided and (case.compiles_whole or not self._facts.blocks)
        micro_batch, compiled = case.micro_batch, case.compiled and (unit.is_block or everything)
        if unit is self._costs[case.policy].units[-1]:
            compiled = case.fuses_loss
        stream = self._stream(case.policy, micro_batch)
        shares = [division.share(unit, micro_batch, stream) for division in self._divisions(case.inner)]
        parts = prod(share.parts for share in shares)
        read = {self._first[name] for name in unit.parameters}
        elements, trainable, inside = self._held(read, case.inner)
        shard_units = self._by_shard_unit(read, gathers=case.gathers)
        ways = self._compiled_kernels(unit, case)
        if ways is not None:
            passes = [self._seconds(part, micro_batch, shares, compiled=False) for part in ways]
            launches = [len(part) for part in ways]
        else:
            ways = (unit.forward, unit.backward)
            if case.compiles_whole and compiled:
                ways = tuple(map(kernels.padded, unit.forward)), tuple(map(kernels.padded, unit.backward))
            passes = [self._seconds(part, micro_batch, shares, compiled) for part in ways]
            launches = [kernels.launches(part, compiled) for part in ways]
        forward, backward = (one.total for one in passes)
        again = 1 if case.policy[1] == "full" and unit.is_block else 0
        surplus = [share.surplus for share in shares if share.surplus]
        more = sum(kernels.seconds(one.product, micro_batch, 1, self._hardware) for one in surplus)
        forward, backward = forward + more, backward + (2 + again) * more
        crowd = sum(one.kept for one in surplus)
        # Blocks that recompute gather their inputs again, and so do not keep them.
        keeps_gathered = unit.is_block and case.policy[1] == "none"
        held = sum(share.regathered * share.parts / parts for share in shares) if keeps_gathered else 0.0
        programs = keeps_gathered and case.recorded
        beside = sum(share.beside * share.parts / parts for share in shares) if programs else 0.0
        gathered = case.gathered * held + beside
        passing = 0.0 if keeps_gathered else sum(share.passing * share.parts / parts for share in shares)
        kept = unit.kept.at(micro_batch) / parts + gathered + (0.0 if again else crowd)
        saved = kept * (1 - case.keeps) if unit.is_block else 0.0
        return UnitWork(
            name=unit.name,
            is_block=unit.is_block,
            forward=forward,
            backward=backward,
            forward_launches=launches[0],
            backward_launches=launches[1],
            kept=kept - saved,
            output=min(unit.output.at(micro_batch), stream),
            forward_peak=unit.forward_peak.at(micro_batch) / parts + gathered + passing + crowd,
            backward_peak=unit.backward_peak.at(micro_batch) / parts + gathered - saved + 2 * passing + 1.5 * crowd,
            elements=elements,
            gathered_with=max((self._unit_sizes(case.inner, case.gathers)[name] for name in shard_units), default=0),
            in_units=sum(self._held(names, case.inner)[0] for names in shard_units.values()),
            trainable=trainable,
            inside=inside,
            tensors=len(unit.parameters),
            intercepted=any(share.intercepted for share in shares),
            sent=tuple(
                (_part_of(share.forward, parts // share.parts), _part_of(share.backward, parts // share.parts))
                for share in shares
            ),
            host=self._own_host(unit, case, compiled),
            launching=(launching(ways[0]), launching(ways[1])),
            kernels=passes[0] + passes[1],
        )

    def _own_host(self, unit: UnitCosts, case: _Case, compiled: bool) -> tuple[float, float] | None:
        """Host seconds of a unit's own forward and backward, if they are timed and run."""
        passes = None if compiled else self.host(case.policy[0])
        return None if passes is None else passes.units.get(unit.like)

    def _compiled_kernels(self, unit: UnitCosts, case: _Case) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]] | None:
        """Forward and backward of a block as the compiler fuses it; None if that is not known."""
        if not unit.is_block or not self._compiles_plainly(case):
            return None
        known = self._compiled.get(case.policy[0])
        return (known.forward, known.backward) if known is not None and known.forward else None

    @staticmethod
    def _compiles_plainly(case: _Case) -> bool:
        """Whether the model is compiled as one, with nothing that changes what the compiler sees."""
        return case.compiles_whole and not case.pieced and case.policy[1] == "none"

    def _seconds(
        self, part: tuple[Kernel, ...], samples: float, shares: list[UnitShare], compiled: bool
    ) -> KernelSeconds:
        """Device time of a unit's forward or backward."""
        if self.prices is None:
            divided = ((kernel, _kernel_parts(kernel, shares)) for kernel in part)
            usual = (kernels.seconds(kernel, samples, parts, self._hardware, compiled) for kernel, parts in divided)
            return KernelSeconds(catalogue=sum(usual))
        found = KernelSeconds()
        for kernel in part:
            found += self.prices.seconds(kernel, samples, _kernel_parts(kernel, shares), compiled=compiled)
        return found

    def stream(self, step_layout: StepLayout) -> float:
        """Bytes of a micro-batch's activations between blocks, whole."""
        return self._stream((step_layout.precision, step_layout.recompute), step_layout.micro_batch)

    def _flow(self, policy: tuple[str, str], micro_batch: int) -> float:
        """Bytes of the activations between blocks."""
        units = self._costs[policy].units
        sizes = [unit.output.at(micro_batch) for unit in units if unit.is_block]
        return max(sizes or [unit.output.at(micro_batch) for unit in units])


def _hold(work: list[UnitWork], moments: Sequence[CompiledMoment], micro_batch: int) -> None:
    """Let units hold the memory of a compiled step's moments, each as soon as its share of gradients is made."""
    work[:] = (replace(unit, kept=0.0, forward_peak=0.0, backward_peak=0.0) for unit in work)
    trainable = sum(unit.trainable for unit in work)
    for moment in moments:
        place, missing = max(0, len(work) - 2), moment.gradients * trainable  # the last unit is the loss
        while place > 0 and missing >= 1:
            missing -= work[place].trainable
            place -= 1
        held = max(work[place].backward_peak, moment.activations.at(micro_batch))
        work[place] = replace(work[place], backward_peak=held)


def _compiles_whole(step_layout: StepLayout) -> bool:
    """Whether the model is compiled as one, and not block by block with eager code around them."""
    return step_layout.compile and step_layout.compiles_whole and not step_layout.inner


def _kernel_parts(kernel: Kernel, shares: list[UnitShare]) -> int:
    return prod(share.kernel_parts(kernel) if share.kernel_parts else share.parts for share in shares)


def _part_of(sent: tuple[Sent, ...], others: int) -> tuple[Sent, ...]:
    """One axis's messages when other axes divide the activations too."""
    return sent if others == 1 else tuple(replace(each, bytes=each.bytes / others) for each in sent)


def _without_output(unit: UnitWork, output: float) -> UnitWork:
    """A unit whose output and its gradient never exist."""
    return replace(
        unit,
        kept=max(0.0, unit.kept - output),
        forward_peak=max(0.0, unit.forward_peak - output),
        backward_peak=max(0.0, unit.backward_peak - output),
    )


def _fused_loss(loss: UnitWork, gradient: float) -> UnitWork:
    """A compiled loss only allocates the gradient of its input."""
    return replace(loss, kept=0.0, forward_peak=0.0, backward_peak=gradient)


def held_twice(step_layout: StepLayout) -> float:
    """The share of gathered inputs that the allocator does not have back when hosts wait."""
    return max(0.0, 1 - RETURNED / step_layout.stages)


def cut_by_compute(facts: ModelFacts, count: int) -> Stages:
    """Cut a model into stages by FLOPs, as nanotron does."""
    total, done, starts = sum(call.flops for call in facts.calls), 0.0, [0]
    for index, call in enumerate(facts.calls):
        done += call.flops
        if len(starts) < count and done >= total * len(starts) / count:
            starts.append(index + 1)
    if len(starts) < count:
        raise Refused(f"{count} stages are too many: nothing would be left to compute for the last of them.")
    return Stages(tuple(starts), len(facts.calls))
