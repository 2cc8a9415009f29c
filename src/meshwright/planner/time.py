"""Seconds of one step by cause: compute, the host, each axis's exposed communication, idle stages, the update.

Streams run side by side: a device computes while its links carry what does not have to be waited for, so what is
exposed falls out instead of being assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from meshwright.facts.hardware import Hardware
from meshwright.facts.strategy import AxisTerm
from meshwright.planner.collectives import RankGroup, group_on
from meshwright.planner.kernels import moving
from meshwright.planner.stage_costs import WIDE, StageCosts, StageWork, UnitWork
from meshwright.planner.step_layout import StepLayout, inner_causes, stages_of
from meshwright.schedules import FAMILIES
from meshwright.strategies.division import Sent

UPDATE_BYTES = 28
"""Of one element in a fused Adam step: parameter, gradient and two moments are read, all but the gradient written."""
MESSAGE = 256e6
"""Bytes of the largest message that engines send at once; more is several, one after the other."""
DATA_PLACE = 0
"""Of the data axis in the mesh: axes of a higher place are inside of it."""
BUCKET = 25e6
"""Bytes of gradients that DDP sends at once."""


@dataclass
class Timing:
    """Seconds by cause, adding up to the step."""

    parts: dict[str, float] = field(default_factory=dict)
    waits: float = 0.0
    """Of the host's, what every step has."""
    busy: list[float] = field(default_factory=list)
    """Seconds that each rank of a pipeline works in a step."""

    def add(self, cause: str, seconds: float) -> None:
        self.parts[cause] = self.parts.get(cause, 0.0) + seconds

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def stalls(self) -> bool:
        """Whether devices wait for their hosts while micro-batches run."""
        return self.parts.get("host", 0.0) > self.waits


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a step layout runs: who talks to whom over which links."""

    hardware: Hardware
    per_node: int
    """Devices of a node."""
    step_layout: StepLayout
    collective: Callable[[str, float, RankGroup], float]
    """Seconds of one collective of so many bytes."""

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
        return tuple((term, group_on(term.size, self._stride(term.traits.place), self.per_node)) for term in terms)

    def _stride(self, place: int) -> int:
        """Ranks of the data axis and the inner axes that are further in than a place of the mesh."""
        inner = prod(term.size for term in self.step_layout.inner if term.traits.place > place)
        return inner * self.step_layout.data if place < DATA_PLACE else inner

    @cached_property
    def shard(self) -> RankGroup:
        return group_on(self.step_layout.shards, self._stride(DATA_PLACE), self.per_node)

    @cached_property
    def replica(self) -> RankGroup:
        a = self.step_layout
        return group_on(a.data // a.shards, self._stride(DATA_PLACE) * a.shards, self.per_node)

    @cached_property
    def data(self) -> RankGroup:
        return group_on(self.step_layout.data, self._stride(DATA_PLACE), self.per_node)

    @cached_property
    def neighbour(self) -> RankGroup:
        """A stage and the next one."""
        return group_on(2, self.step_layout.inner_ranks * self.step_layout.data, self.per_node)

    def time(self, kind: str, size: float, group: RankGroup) -> float:
        """Seconds to send so many bytes, in messages that are not larger than gradients are collected to."""
        if group.ranks == 1 or size <= 0:
            return 0.0
        messages = max(1, round(size / MESSAGE))
        return messages * self.collective(kind, size / messages, group)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A stage's forward or backward of one micro-batch."""

    compute: float
    sent: dict[str, float]
    """Communication of each inner axis, which compute waits for, by the name of its mesh axis."""
    host: float
    """What the host needs beyond both."""

    @property
    def total(self) -> float:
        return self.compute + sum(self.sent.values()) + self.host

    @property
    def parts(self) -> dict[str, float]:
        return {"compute": self.compute, **self.sent, "host": self.host}


def forecast_time(step_layout: StepLayout, stage_costs: StageCosts, hardware: Hardware, per_node: int) -> Timing:
    """Raises `Refused` where the model cannot be cut so."""
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
    timing.waits = 0.0 if site.is_cpu else step_layout.host.step
    timing.add("host", timing.waits)
    return timing


def stage_passes(site: Site, stage: StageWork) -> tuple[Pass, Pass]:
    """Forward and backward of one micro-batch on one stage."""
    return _pass(site, stage, backward=False), _pass(site, stage, backward=True)


def _pass(site: Site, stage: StageWork, *, backward: bool) -> Pass:
    compute = asked = 0.0
    sent = dict.fromkeys(site.causes, 0.0)
    axes = [(term.traits.mesh_name, group, _meeting(site, group.ranks)) for term, group in site.inner]
    for unit, times in stage.counted:
        compute += times * ((unit.backward if backward else unit.forward) + _preparing(site, unit, backward=backward))
        host = _launching(site, unit, backward=backward)
        for (cause, group, meeting), own in zip(axes, unit.sent, strict=True):
            sent[cause] += times * _sending(site, group, own[backward])
            host += sum(message.times for message in own[backward]) * meeting
        asked += times * host
    if backward:
        compute += _accumulating(site, stage.trainable)
    if not site.is_cpu:
        asked += site.step_layout.host.neighbour * (site.step_layout.stage_ranks > 1)
        asked += _sharded_host(site, stage, backward=backward)
    return Pass(compute=compute, sent=sent, host=max(0.0, asked - compute - sum(sent.values())))


def _launching(site: Site, unit: UnitWork, *, backward: bool) -> float:
    """Host seconds of asking for all of a unit's kernels."""
    a = site.step_layout
    launches = unit.backward_launches if backward else unit.forward_launches
    if site.is_cpu:
        return launches * site.hardware.launch
    plain = each = site.hardware.launch + a.host.operator
    if unit.intercepted:
        each += a.host.divided[backward]
    casts = unit.tensors if a.cast_bytes else 0
    if a.recompute == "none" or not unit.is_block:
        return launches * each + casts * plain
    again = casts * plain + a.host.repeated if backward else 0.0
    selecting = (unit.forward_launches + casts) * a.host.selected if a.recompute == "selective" else 0.0
    return launches * each + casts * plain + again + selecting


def _preparing(site: Site, unit: UnitWork, *, backward: bool) -> float:
    """Device seconds until a unit's parameters lie where they are read, in the dtype that is computed with."""
    a = site.step_layout
    repeats = backward and a.recompute != "none" and unit.is_block
    if a.cast_bytes and (not backward or repeats):
        return moving(unit.elements * (a.parameter_bytes + a.compute_bytes), site.hardware)
    if a.gathers and a.host.gathers_by_copy and (a.reshards or not backward):
        return moving(unit.elements * 2 * a.compute_bytes, site.hardware)
    return 0.0


def _sharded_host(site: Site, stage: StageWork, *, backward: bool) -> float:
    """Host seconds of the data axis's own collectives in one micro-batch, unit by unit."""
    a = site.step_layout
    if a.shards == 1:
        return 0.0
    gathers = a.gathers and (a.reshards or not backward)
    reduces = backward / a.micro_batches  # in the last micro-batch only
    units = sum(times for unit, times in stage.counted if unit.elements)
    return units * a.host.shard * (gathers + reduces)


def _accumulating(site: Site, elements: int) -> float:
    """Adding a micro-batch's gradients to the sum: one is read, the other read and written."""
    a = site.step_layout
    if a.micro_batches == 1 and a.compute_bytes == a.gradient_bytes:
        return 0.0
    return moving(elements * (a.compute_bytes + 2 * a.gradient_bytes), site.hardware)


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
    """Whole parameters on every rank: micro-batches one after another, gradients summed in the last one."""
    a = site.step_layout
    forward, backward = stage_passes(site, stage)
    for part in (forward, backward):
        _add_pass(timing, part, a.micro_batches)
    sent = _gradient_sum(site, stage.trainable)
    if a.overlaps:
        # The first gradients are ready after the last unit's backward, the last bucket after all of it.
        least = site.time("all_reduce", min(BUCKET, stage.trainable * a.reduce_bytes), site.data)
        sent = max(least, sent - backward.total)
    times = a.micro_batches if a.one_process else 1  # a copy of the parameters and a sum are an all-reduce together
    timing.add("data", times * sent if a.data > 1 else 0.0)


def _gradient_sum(site: Site, elements: int) -> float:
    """Seconds until every rank that updates an element has its sum over ranks."""
    a = site.step_layout
    size = elements * a.reduce_bytes
    if a.optimizer_over > 1 or a.gradients_over > 1:
        return site.time("reduce_scatter", size, site.shard) + site.time("all_reduce", size / a.shards, site.replica)
    return site.time("all_reduce", size, site.data)


def _gathering(timing: Timing, site: Site, stage: StageWork) -> None:
    """FSDP: each block's parameters are gathered while the one before computes; gradients leave while the next does."""
    a = site.step_layout
    moves = {
        unit.name: (
            site.time("all_gather", unit.elements * a.compute_bytes, site.shard),
            _gradient_sum(site, unit.trainable) if unit.trainable else 0.0,
            [
                sum(_sending(site, group, own[way]) for (_, group), own in zip(site.inner, unit.sent, strict=True))
                for way in (0, 1)
            ],
        )
        for unit, _ in stage.counted
    }
    forward, backward = stage_passes(site, stage)
    for part in (forward, backward):
        _add_pass(timing, part, a.micro_batches)
    ahead = [(unit.forward + moves[unit.name][2][0], moves[unit.name][0], 0.0) for unit in stage.units]
    gathers = 1.0 if a.reshards else 0.0
    back = [(u.backward + moves[u.name][2][1], gathers * moves[u.name][0], 0.0) for u in reversed(stage.units)]
    final = [
        (compute, gather, moves[u.name][1]) for (compute, gather, _), u in zip(back, reversed(stage.units), strict=True)
    ]
    exposed = a.micro_batches * _exposed(ahead) + (a.micro_batches - 1) * _exposed(back) + _exposed(final)
    # While the host is behind, links catch up.
    timing.add("data", max(0.0, exposed - a.micro_batches * (forward.host + backward.host)))


def _exposed(row: list[tuple[float, float, float]]) -> float:
    """Seconds that a row of units (compute, gather before, reduce after) waits for its one link.

    One gather runs ahead: it may begin when the unit before the one that computes now has been let go.
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
    """Closed form of a schedule: the dearest rank computes all its micro-batches, and waits for the others' first."""
    a = site.step_layout
    made: dict[object, tuple[Pass, Pass]] = {}
    for stage in stages:
        if stage.counted not in made:
            made[stage.counted] = stage_passes(site, stage)
    passes = [made[stage.counted] for stage in stages]
    ranks = stages_of(a)
    work = [sum(passes[i][0].total + passes[i][1].total for i in own) for own in ranks]
    dearest = max(range(a.stage_ranks), key=work.__getitem__)
    updates = [moving(_updated(a, sum(stages[i].trainable for i in own)), site.hardware) for own in ranks]
    timing.busy = [a.micro_batches * each + update for each, update in zip(work, updates, strict=True)]
    for i in ranks[dearest]:
        for part in passes[i]:
            _add_pass(timing, part, a.micro_batches)
    timing.add("bubble", _bubble(a, work))
    hops = 2 * (a.stage_ranks - 1)
    timing.add("stages", hops * site.time("send", max(stage.output for stage in stages[:-1]), site.neighbour))
    busiest = max(stages, key=lambda stage: stage.trainable)
    if a.data > 1:
        timing.add("data", _gradient_sum(site, busiest.trainable * a.virtual))
    if a.gathers:
        timing.add("data", site.time("all_gather", busiest.elements * a.virtual * a.compute_bytes, site.shard))


def _bubble(a: StepLayout, work: list[float]) -> float:
    """Seconds that the dearest rank waits for others in one step."""
    others, family = sum(work) - max(work), FAMILIES[a.schedule]
    return a.micro_batches * others if family.one_at_a_time else others / family.gap_divisor


def _add_pass(timing: Timing, part: Pass, times: int) -> None:
    for cause, seconds in part.parts.items():
        timing.add(cause, seconds * times)


def _update(timing: Timing, site: Site, stages: tuple[StageWork, ...]) -> None:
    a, h = site.step_layout, site.hardware
    busiest = max(stage.trainable for stage in stages) * a.virtual
    own = busiest / a.optimizer_over
    timing.add("update", moving(_updated(a, busiest), h))
    if a.offload:
        moved = own * (a.gradient_bytes + a.parameter_bytes)
        timing.add("host copies", moved / h.host.bandwidth + own * UPDATE_BYTES / (HOST_BANDWIDTH / site.per_node))
    if a.optimizer_over > 1 and not a.gathers:
        timing.add("data", site.time("all_gather", busiest * a.compute_bytes, site.shard))


def _updated(a: StepLayout, elements: int) -> float:
    """Bytes that the optimizer reads and writes."""
    return elements / a.optimizer_over * UPDATE_BYTES


HOST_BANDWIDTH = 2e11
"""Bytes a second of a two-socket server's memory, which its devices share: eight channels of DDR4-3200 a socket."""
