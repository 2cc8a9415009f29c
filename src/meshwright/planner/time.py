"""Seconds of one step by cause: compute, the host, each axis's exposed communication, idle stages, the update.

Compute and communication streams run concurrently, so exposed communication is computed, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, prod

from meshwright.facts.catalogue import is_measured
from meshwright.facts.hardware import Hardware
from meshwright.facts.links import KINDS
from meshwright.facts.strategy import AxisTerm
from meshwright.planner.collectives import RankGroup, group_on
from meshwright.planner.kernels import moving
from meshwright.planner.stage_costs import WIDE, StageCosts, StageWork, UnitWork
from meshwright.planner.step_layout import BUCKET, StepLayout, inner_causes, stages_of
from meshwright.schedules import FAMILIES
from meshwright.strategies.model_axis import Sent

UPDATE_BYTES = 28
"""Bytes per element in a fused Adam step: parameter, gradient and two moments are read, all but gradients written."""
MESSAGE = 256e6
"""Bytes of the largest message that engines send at once; a larger one is split."""
DATA_PLACE = 0
"""Place of the data axis in the mesh; axes of a higher place are inside it."""
HOST_BANDWIDTH = 2e11
"""Bytes per second of a two-socket server's memory, shared by its devices: eight channels of DDR4-3200 a socket."""


@dataclass
class Timing:
    """Seconds of a step by cause; they add up to the step."""

    parts: dict[str, float] = field(default_factory=dict)
    waits: float = 0.0
    """Host seconds spent once per step."""
    busy: list[float] = field(default_factory=list)
    """Busy seconds of each pipeline rank in one step."""
    stalled: bool = False
    """Whether messages between stages lose time on a stalled path."""

    def add(self, cause: str, seconds: float) -> None:
        self.parts[cause] = self.parts.get(cause, 0.0) + seconds

    def add_passes(self, times: int, *passes: Pass) -> None:
        for one in passes:
            for cause, seconds in one.parts.items():
                self.add(cause, seconds * times)

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def stalls(self) -> bool:
        """Whether devices wait for their hosts during micro-batches."""
        return self.parts.get("host", 0.0) > self.waits


@dataclass(frozen=True, kw_only=True)
class Site:
    """A step layout on a cluster: its rank groups and the cost of their collectives."""

    hardware: Hardware
    per_node: int
    """Devices per node."""
    step_layout: StepLayout
    collective: Callable[[str, float, RankGroup], float]
    """Seconds of one collective, from its kind, bytes and group."""

    @property
    def is_cpu(self) -> bool:
        return self.hardware.device == "cpu"

    @cached_property
    def causes(self) -> tuple[str, ...]:
        return inner_causes()

    @cached_property
    def inner(self) -> tuple[tuple[AxisTerm, RankGroup], ...]:
        """Each inner axis and its group."""
        terms = self.step_layout.inner
        return tuple((term, self._group(term.size, self._stride(term.traits.place))) for term in terms)

    def _group(self, axis_size: int, inner: int) -> RankGroup:
        return group_on(axis_size, inner, self.per_node, self.nodes)

    @property
    def nodes(self) -> int:
        return ceil(self.step_layout.ranks / self.per_node)

    def _stride(self, place: int) -> int:
        """Number of consecutive ranks inside one step of the axis at a place of the mesh."""
        inner = prod(term.size for term in self.step_layout.inner if term.traits.place > place)
        return inner * self.step_layout.data if place < DATA_PLACE else inner

    @cached_property
    def shard(self) -> RankGroup:
        return self._group(self.step_layout.shards, self._stride(DATA_PLACE))

    @cached_property
    def replica(self) -> RankGroup:
        layout = self.step_layout
        return self._group(layout.data // layout.shards, self._stride(DATA_PLACE) * layout.shards)

    @cached_property
    def data(self) -> RankGroup:
        return self._group(self.step_layout.data, self._stride(DATA_PLACE))

    @cached_property
    def neighbour(self) -> RankGroup:
        """The group of a stage and the next one."""
        return self._group(2, self.step_layout.inner_ranks * self.step_layout.data)

    @cached_property
    def stall(self) -> float:
        """Seconds that each message between nodes loses in the median run of this size."""
        known = self.nodes == 1 or is_measured(self.hardware, "between.latency")
        return 0.0 if known else KINDS[self.hardware.between.kind].usual_stall(self.nodes)

    def time(self, kind: str, size: float, group: RankGroup) -> float:
        """Seconds to communicate `size` bytes, in messages of about `MESSAGE` bytes."""
        if group.ranks == 1 or size <= 0:
            return 0.0
        messages = max(1, round(size / MESSAGE))
        return messages * self.collective(kind, size / messages, group)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of a stage's forward or backward for one micro-batch."""

    compute: float
    sent: dict[str, float]
    """Exposed communication of each inner axis, by the name of its mesh axis."""
    host: float
    """Host seconds beyond both."""

    @property
    def total(self) -> float:
        return self.compute + sum(self.sent.values()) + self.host

    @property
    def parts(self) -> dict[str, float]:
        return {"compute": self.compute, **self.sent, "host": self.host}


def forecast_time(step_layout: StepLayout, stage_costs: StageCosts, hardware: Hardware, per_node: int) -> Timing:
    """Forecast the seconds of a step; `Refused` if the model cannot be cut into the stages."""
    site = Site(hardware=hardware, per_node=per_node, step_layout=step_layout, collective=stage_costs.collective)
    stages = stage_costs.of(step_layout)
    timing = Timing()
    if step_layout.stage_ranks > 1:
        _pipeline(timing, site, stages)
    elif step_layout.gathers:
        _gathering(timing, site, stages[0])
    else:
        _plain(timing, site, stages[0])
    _update(timing, site, stages)
    if site.data.nodes > 1:
        timing.add("data", site.stall)
    once = step_layout.host.step_of_graphs if step_layout.graphs else step_layout.host.step
    timing.waits = 0.0 if site.is_cpu else once
    timing.add("host", timing.waits)
    return timing


def stage_passes(site: Site, stage: StageWork) -> tuple[Pass, Pass]:
    """Forward and backward of one micro-batch on one stage."""
    return _pass(site, stage, backward=False), _pass(site, stage, backward=True)


def _pass(site: Site, stage: StageWork, *, backward: bool) -> Pass:
    compute = host_total = 0.0
    sent = dict.fromkeys(site.causes, 0.0)
    axes = [(term.traits.mesh_name, group, _meeting(site, group.ranks)) for term, group in site.inner]
    for unit, times in stage.counted:
        compute += times * ((unit.backward if backward else unit.forward) + _preparing(site, unit, backward=backward))
        host = _launching(site, unit, backward=backward)
        for (cause, group, meeting), own in zip(axes, unit.sent, strict=True):
            sent[cause] += times * _sending(site, group, own[backward])
            host += sum(message.times for message in own[backward]) * meeting
        host_total += times * host
    if backward:
        compute += _accumulating(site, stage.trainable)
    if not site.is_cpu:
        host_total += site.step_layout.host.neighbour * (site.step_layout.stage_ranks > 1)
        host_total += _sharded_host(site, stage, backward=backward)
    return Pass(compute=compute, sent=sent, host=max(0.0, host_total - compute - sum(sent.values())))


def _launching(site: Site, unit: UnitWork, *, backward: bool) -> float:
    """Host seconds of launching a unit's kernels."""
    layout = site.step_layout
    launches = unit.backward_launches if backward else unit.forward_launches
    if site.is_cpu:
        return launches * site.hardware.launch
    if layout.graphs:
        return launches * layout.host.node
    plain = each = site.hardware.launch + layout.host.operator
    if unit.intercepted:
        each += layout.host.divided[backward]
    # Casts of all parameters at once launch less, but the host's costs were fitted to steps that cast each alone.
    casts = unit.tensors if layout.cast_bytes else 0
    if layout.recompute == "none" or layout.compile or not unit.is_block:  # compiled code recomputes by itself
        return launches * each + casts * plain
    if layout.recompute == "selective":
        return launches * each + casts * plain + (unit.forward_launches + casts) * layout.host.selected
    again = casts * plain + layout.host.repeated if backward else 0.0
    return launches * each + casts * plain + again


def _preparing(site: Site, unit: UnitWork, *, backward: bool) -> float:
    """Device seconds of casting or copying a unit's parameters before they are read."""
    layout = site.step_layout
    repeats = layout.casts_each and layout.recompute != "none" and unit.is_block
    if layout.cast_bytes and (not backward or repeats):
        passes = 1 if layout.casts_each or layout.graphs else layout.micro_batches
        return moving(unit.elements * (layout.parameter_bytes + layout.compute_bytes), site.hardware) / passes
    if layout.gathers and layout.host.gathers_by_copy and (layout.reshards or not backward):
        return moving(unit.elements * 2 * layout.compute_bytes, site.hardware)
    return 0.0


def _sharded_host(site: Site, stage: StageWork, *, backward: bool) -> float:
    """Host seconds of the data axis's collectives in one micro-batch."""
    layout = site.step_layout
    if layout.shards == 1:
        return 0.0
    gathers = layout.gathers and (layout.reshards or not backward)
    reduces = backward / (1 if layout.reduces_each else layout.micro_batches)  # or in the last micro-batch only
    units = sum(times for unit, times in stage.counted if unit.elements)
    return units * layout.host.shard * (gathers + reduces)


def _accumulating(site: Site, elements: int) -> float:
    """Device seconds of adding a micro-batch's gradients to the sum: one is read, the other read and written.

    If they are reduced first, they are cast whole, and only a shard is added.
    """
    layout = site.step_layout
    casts = layout.compute_bytes != layout.gradient_bytes
    if layout.micro_batches == 1 and not casts:
        return 0.0
    if layout.reduces_each:
        added = 3 * layout.gradient_bytes / layout.gradients_over if layout.micro_batches > 1 else 0.0
        # FSDP2 casts to the dtype that it sends, our ZeRO to that of the masters.
        whole = layout.reduce_bytes if layout.gathers else layout.gradient_bytes
        cast = layout.compute_bytes + 2 * whole if casts else 0.0
        return moving(elements * (cast + added), site.hardware)
    # Where ranks keep whole sums, these are rounded to be sent and cast back, once a step.
    rounded = layout.optimizer_over == 1 and layout.reduce_bytes < layout.gradient_bytes
    back = 2 * rounded * (layout.gradient_bytes + layout.reduce_bytes) / layout.micro_batches
    return moving(elements * (layout.compute_bytes + 2 * layout.gradient_bytes + back), site.hardware)


def _meeting(site: Site, ranks: int) -> float:
    """Host seconds of one collective of an inner axis."""
    if site.is_cpu:
        return 0.0
    crosses = site.step_layout.stage_ranks > 1 and site.neighbour.nodes > 1
    host = site.step_layout.host
    stall = host.stall * ranks * max(1.0, ranks / WIDE) if crosses and not site.step_layout.compile else 0.0
    return host.collective + stall


def _sending(site: Site, group: RankGroup, messages: tuple[Sent, ...]) -> float:
    return sum(message.times * site.time(message.kind, message.bytes, group) for message in messages)


def _plain(timing: Timing, site: Site, stage: StageWork) -> None:
    """Add the time of a step with whole parameters on every rank."""
    layout = site.step_layout
    forward, backward = stage_passes(site, stage)
    timing.add_passes(layout.micro_batches, forward, backward)
    sent = _exposed_sums(site, stage, backward.total) if layout.overlaps else _gradient_sum(site, stage.trainable)
    # In one process, broadcasting parameters and reducing gradients cost an all-reduce per micro-batch.
    times = layout.micro_batches if layout.one_process or layout.reduces_each else 1
    timing.add("data", times * sent if layout.data > 1 else 0.0)


def _gradient_sum(site: Site, elements: int) -> float:
    """Seconds of reducing gradients to the ranks that update them."""
    layout = site.step_layout
    size = elements * layout.reduce_bytes
    if layout.optimizer_over > 1 or layout.gradients_over > 1:
        across = site.time("all_reduce", size / layout.shards, site.replica)
        return site.time("reduce_scatter", size, site.shard) + across
    return site.time("all_reduce", size, site.data)


def _exposed_sums(site: Site, stage: StageWork, backward: float) -> float:
    """Seconds that backward, and the step after it, wait for gradients that are reduced while it runs."""
    layout = site.step_layout
    if layout.optimizer_over == 1:
        # DDP: the first gradients are ready after the last unit's backward, the last bucket after all of it.
        last = min(round(BUCKET / layout.gradient_bytes), stage.trainable)
        exposed = max(_on_the_wire(site, last), _on_the_wire(site, stage.trainable) - backward)
    else:
        exposed = _one_at_a_time(site, stage, backward)
    return exposed + _processor_seconds(site, stage.trainable)


def _one_at_a_time(site: Site, stage: StageWork, backward: float) -> float:
    """ZeRO's buckets: a shard unit's when it is done, and the rest at the end. Each waits for the one before."""
    pace = backward / max(sum(unit.backward for unit in stage.units), 1e-12)
    done = link = 0.0
    around = stage.trainable
    for unit in reversed(stage.units):
        done += unit.backward * pace
        if ready := min(unit.trainable, unit.in_units):
            done = max(done, link)
            link = done + _on_the_wire(site, ready)
            around -= ready
    return max(done, link) + _on_the_wire(site, max(0, around)) - backward


def _on_the_wire(site: Site, elements: int) -> float:
    """Seconds of reducing gradients that computing can hide."""
    return _gradient_sum(site, elements) - _processor_seconds(site, elements)


def _processor_seconds(site: Site, elements: int) -> float:
    """Seconds of reducing gradients that no computing hides: on a CPU, gloo's copies and sums take the same cores.

    They are what the collective takes within a node, where no wire is slower than them.
    """
    if not site.is_cpu:
        return 0.0
    whole = _gradient_sum(site, elements)
    return min(whole, _gradient_sum(replace(site, per_node=site.step_layout.ranks), elements))


def _gathering(timing: Timing, site: Site, stage: StageWork) -> None:
    """Add the time of an FSDP step: gathers overlap with the previous block, gradient sums with the next."""
    layout = site.step_layout
    moves = {
        unit.name: (
            site.time("all_gather", unit.elements * layout.compute_bytes, site.shard),
            _gradient_sum(site, unit.trainable) if unit.trainable else 0.0,
            [
                sum(_sending(site, group, own[way]) for (_, group), own in zip(site.inner, unit.sent, strict=True))
                for way in (0, 1)
            ],
        )
        for unit, _ in stage.counted
    }
    forward, backward = stage_passes(site, stage)
    timing.add_passes(layout.micro_batches, forward, backward)
    ahead = [(unit.forward + moves[unit.name][2][0], moves[unit.name][0], 0.0) for unit in stage.units]
    regathers = 1.0 if layout.reshards else 0.0
    last = [
        (unit.backward + sends[1], regathers * gather, reduce)
        for unit, (gather, reduce, sends) in ((unit, moves[unit.name]) for unit in reversed(stage.units))
    ]
    back = [(compute, gather, reduce if layout.reduces_each else 0.0) for compute, gather, reduce in last]
    wait = _waiting if site.is_cpu else _exposed
    exposed = layout.micro_batches * wait(ahead) + (layout.micro_batches - 1) * wait(back) + wait(last)
    # Links catch up while the device waits for the host.
    timing.add("data", max(0.0, exposed - layout.micro_batches * (forward.host + backward.host)))


def _waiting(row: list[tuple[float, float, float]]) -> float:
    """Seconds of all messages: on a CPU, which has no streams, FSDP2 computes nothing while it sends."""
    return sum(gather + reduce for _, gather, reduce in row)


def _exposed(row: list[tuple[float, float, float]]) -> float:
    """Seconds that a sequence of units (compute, gather before, reduce after) waits for its link.

    One gather runs ahead: it may start when the unit before the current one has been freed.
    """
    link = begun = done = computed = 0.0
    for compute, gather, reduce in row:
        link = max(link, begun) + gather
        begun = max(done, link if gather else 0.0)
        done = begun + compute
        computed += compute
        if reduce:
            link = max(link, begun) + reduce
    return max(done, link if row and row[-1][2] else done) - computed


def _pipeline(timing: Timing, site: Site, stages: tuple[StageWork, ...]) -> None:
    """Add the time of a pipeline, in closed form: the slowest rank's micro-batches and its wait for the others."""
    layout = site.step_layout
    made: dict[object, tuple[Pass, Pass]] = {}
    for stage in stages:
        if stage.counted not in made:
            made[stage.counted] = stage_passes(site, stage)
    passes = [made[stage.counted] for stage in stages]
    ranks = stages_of(layout)
    work = [sum(passes[i][0].total + passes[i][1].total for i in own) for own in ranks]
    slowest = max(range(layout.stage_ranks), key=work.__getitem__)
    updates = [moving(_updated(layout, sum(stages[i].trainable for i in own)), site.hardware) for own in ranks]
    timing.busy = [layout.micro_batches * each + update for each, update in zip(work, updates, strict=True)]
    for i in ranks[slowest]:
        timing.add_passes(layout.micro_batches, *passes[i])
    timing.add("bubble", _bubble(layout, work))
    lost = _stalls(site)
    timing.stalled = lost > 0
    timing.add("stages", lost)
    hops = 2 * (layout.stage_ranks - 1)
    timing.add("stages", hops * site.time("send", max(stage.output for stage in stages[:-1]), site.neighbour))
    busiest = max(stages, key=lambda stage: stage.trainable)
    if layout.data > 1:
        # After a micro-batch's backward the stage waits for the sum; what zero2 has sent by then is left out.
        times = layout.micro_batches if layout.reduces_each else 1
        timing.add("data", times * _gradient_sum(site, busiest.trainable * layout.virtual))
    if layout.gathers:
        size = busiest.elements * layout.virtual * layout.compute_bytes
        timing.add("data", site.time("all_gather", size, site.shard))


def _stalls(site: Site) -> float:
    """Seconds that messages between stages lose on a stalled path: those of a rank with neighbours on both sides."""
    if site.neighbour.nodes == 1:
        return 0.0
    layout = site.step_layout
    neighbours = min(2, layout.stage_ranks - 1)
    return 2 * neighbours * layout.virtual * layout.micro_batches * site.stall


def _bubble(layout: StepLayout, work: list[float]) -> float:
    """Seconds that the slowest rank waits for the others in one step."""
    others, family = sum(work) - max(work), FAMILIES[layout.schedule]
    return layout.micro_batches * others if family.one_at_a_time else others / family.gap_divisor


def _update(timing: Timing, site: Site, stages: tuple[StageWork, ...]) -> None:
    layout, hardware = site.step_layout, site.hardware
    busiest = max(stage.trainable for stage in stages) * layout.virtual
    own = busiest / layout.optimizer_over
    timing.add("update", moving(_updated(layout, busiest), hardware))
    if layout.offload:
        moved = own * (layout.gradient_bytes + layout.parameter_bytes)
        timing.add(
            "host copies", moved / hardware.host.bandwidth + own * UPDATE_BYTES / (HOST_BANDWIDTH / site.per_node)
        )
    if layout.optimizer_over > 1 and not layout.gathers:
        timing.add("data", site.time("all_gather", busiest * layout.compute_bytes, site.shard))


def _updated(layout: StepLayout, elements: int) -> float:
    """Bytes that the optimizer reads and writes."""
    return elements / layout.optimizer_over * UPDATE_BYTES
