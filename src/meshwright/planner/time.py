"""Seconds of one step by cause: compute, the host, each axis's exposed communication, idle stages, the update.

Streams run side by side: a device computes while its links carry what does not have to be waited for, so what is
exposed falls out instead of being assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.facts.hardware import Hardware
from meshwright.planner.arrangement import Arrangement, stages_of
from meshwright.planner.collectives import Group, group_on
from meshwright.planner.kernels import moving
from meshwright.planner.stagewise import WIDE, Loads, StageLoad, UnitLoad

UPDATE_BYTES = 28
"""Of one element in a fused Adam step: parameter, gradient and two moments are read, all but the gradient written."""
MESSAGE = 256e6
"""Bytes of the largest message that engines send at once; more is several, one after the other."""
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
    """Where an arrangement runs: who talks to whom over which links."""

    hardware: Hardware
    per_node: int
    """Devices of a node."""
    arrangement: Arrangement
    collective: Callable[[str, float, Group], float]
    """Seconds of one collective of so many bytes."""

    @property
    def is_cpu(self) -> bool:
        return self.hardware.device == "cpu"

    @cached_property
    def tensor(self) -> Group:
        return group_on(self.arrangement.tp, 1, self.per_node)

    @cached_property
    def shard(self) -> Group:
        return group_on(self.arrangement.shards, self.arrangement.tp, self.per_node)

    @cached_property
    def replica(self) -> Group:
        a = self.arrangement
        return group_on(a.data // a.shards, a.tp * a.shards, self.per_node)

    @cached_property
    def data(self) -> Group:
        return group_on(self.arrangement.data, self.arrangement.tp, self.per_node)

    @cached_property
    def neighbour(self) -> Group:
        """A stage and the next one."""
        return group_on(2, self.arrangement.tp * self.arrangement.data, self.per_node)

    def time(self, kind: str, size: float, group: Group) -> float:
        """Seconds to send so many bytes, in messages that are not larger than gradients are collected to."""
        if group.ranks == 1 or size <= 0:
            return 0.0
        messages = max(1, round(size / MESSAGE))
        return messages * self.collective(kind, size / messages, group)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A stage's forward or backward of one micro-batch."""

    compute: float
    tensor: float
    """Communication of the tensor axis, which compute waits for."""
    host: float
    """What the host needs beyond both."""

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.host


def forecast_time(arrangement: Arrangement, loads: Loads, hardware: Hardware, per_node: int) -> Timing:
    """Raises `Refused` where the model cannot be cut so."""
    site = Site(hardware=hardware, per_node=per_node, arrangement=arrangement, collective=loads.collective)
    stages = loads.of(arrangement)
    timing = Timing()
    if arrangement.pp > 1:
        _pipeline(timing, site, stages)
    elif arrangement.gathers:
        _gathering(timing, site, stages[0])
    else:
        _plain(timing, site, stages[0])
    _update(timing, site, stages)
    timing.waits = 0.0 if site.is_cpu else arrangement.host.step
    timing.add("host", timing.waits)
    return timing


def stage_passes(site: Site, stage: StageLoad) -> tuple[Pass, Pass]:
    """Forward and backward of one micro-batch on one stage."""
    return _pass(site, stage, backward=False), _pass(site, stage, backward=True)


def _pass(site: Site, stage: StageLoad, *, backward: bool) -> Pass:
    compute = tensor = asked = 0.0
    meeting = _meeting(site) if site.arrangement.tp > 1 else 0.0
    for unit, times in stage.counted:
        compute += times * ((unit.backward if backward else unit.forward) + _preparing(site, unit, backward=backward))
        waited, meetings = _tensor_time(site, unit)
        tensor += times * waited
        asked += times * (_launching(site, unit, backward=backward) + meetings * meeting)
    if backward:
        compute += _accumulating(site, stage.trainable)
    if not site.is_cpu:
        asked += site.arrangement.host.neighbour * (site.arrangement.pp > 1)
        asked += _sharded_host(site, stage, backward=backward)
    return Pass(compute=compute, tensor=tensor, host=max(0.0, asked - compute - tensor))


def _launching(site: Site, unit: UnitLoad, *, backward: bool) -> float:
    """Host seconds of asking for all of a unit's kernels."""
    a = site.arrangement
    launches = unit.backward_launches if backward else unit.forward_launches
    if site.is_cpu:
        return launches * site.hardware.launch
    plain = each = site.hardware.launch + a.host.operator
    if a.tp > 1 and unit.divided_layers:
        each += a.host.divided[backward]
    casts = unit.tensors if a.cast_bytes else 0
    if a.recompute == "none" or not unit.is_block:
        return launches * each + casts * plain
    again = casts * plain + a.host.repeated if backward else 0.0
    selecting = (unit.forward_launches + casts) * a.host.selected if a.recompute == "selective" else 0.0
    return launches * each + casts * plain + again + selecting


def _preparing(site: Site, unit: UnitLoad, *, backward: bool) -> float:
    """Device seconds until a unit's parameters lie where they are read, in the dtype that is computed with."""
    a = site.arrangement
    repeats = backward and a.recompute != "none" and unit.is_block
    if a.cast_bytes and (not backward or repeats):
        return moving(unit.elements * (a.parameter_bytes + a.compute_bytes), site.hardware)
    if a.gathers and a.host.gathers_by_copy and (a.reshards or not backward):
        return moving(unit.elements * 2 * a.compute_bytes, site.hardware)
    return 0.0


def _sharded_host(site: Site, stage: StageLoad, *, backward: bool) -> float:
    """Host seconds of the data axis's own collectives in one micro-batch, unit by unit."""
    a = site.arrangement
    if a.shards == 1:
        return 0.0
    gathers = a.gathers and (a.reshards or not backward)
    reduces = backward / a.micro_batches  # in the last micro-batch only
    units = sum(times for unit, times in stage.counted if unit.elements)
    return units * a.host.shard * (gathers + reduces)


def _accumulating(site: Site, elements: int) -> float:
    """Adding a micro-batch's gradients to the sum: one is read, the other read and written."""
    a = site.arrangement
    if a.micro_batches == 1 and a.compute_bytes == a.gradient_bytes:
        return 0.0
    return moving(elements * (a.compute_bytes + 2 * a.gradient_bytes), site.hardware)


def _meeting(site: Site) -> float:
    """Host seconds of one collective of the tensor axis."""
    if site.is_cpu:
        return 0.0
    crosses = site.arrangement.pp > 1 and site.neighbour.nodes > 1
    tp = site.arrangement.tp
    host = site.arrangement.host
    stall = host.stall * tp * max(1.0, tp / WIDE) if crosses and not site.arrangement.compile else 0.0
    return host.collective + stall


def _tensor_time(site: Site, unit: UnitLoad) -> tuple[float, int]:
    """Seconds and number of a unit's collectives along the tensor axis in one direction.

    Where the sequence is divided, each divided layer gathers before and scatters after, and the other way round in
    backward.
    """
    if not unit.divided_layers or site.arrangement.tp == 1:
        return 0.0, 0
    group, size = site.tensor, unit.output
    if not site.arrangement.sequence:
        return unit.divided_layers * site.time("all_reduce", size, group), unit.divided_layers
    once = site.time("all_gather", size, group) + site.time("reduce_scatter", size, group)
    return unit.divided_layers * once, unit.divided_layers * 2


def _plain(timing: Timing, site: Site, stage: StageLoad) -> None:
    """Whole parameters on every rank: micro-batches one after another, gradients summed in the last one."""
    a = site.arrangement
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
    a = site.arrangement
    size = elements * a.reduce_bytes
    if a.optimizer_over > 1 or a.gradients_over > 1:
        return site.time("reduce_scatter", size, site.shard) + site.time("all_reduce", size / a.shards, site.replica)
    return site.time("all_reduce", size, site.data)


def _gathering(timing: Timing, site: Site, stage: StageLoad) -> None:
    """FSDP: each block's parameters are gathered while the one before computes; gradients leave while the next does."""
    a = site.arrangement
    moves = {
        unit.name: (
            site.time("all_gather", unit.elements * a.compute_bytes, site.shard),
            _gradient_sum(site, unit.trainable) if unit.trainable else 0.0,
            _tensor_time(site, unit)[0],
        )
        for unit, _ in stage.counted
    }
    forward, backward = stage_passes(site, stage)
    for part in (forward, backward):
        _add_pass(timing, part, a.micro_batches)
    ahead = [(unit.forward + moves[unit.name][2], moves[unit.name][0], 0.0) for unit in stage.units]
    gathers = 1.0 if a.reshards else 0.0
    back = [(u.backward + moves[u.name][2], gathers * moves[u.name][0], 0.0) for u in reversed(stage.units)]
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


def _pipeline(timing: Timing, site: Site, stages: tuple[StageLoad, ...]) -> None:
    """Closed form of a schedule: the dearest rank computes all its micro-batches, and waits for the others' first."""
    a = site.arrangement
    made: dict[object, tuple[Pass, Pass]] = {}
    for stage in stages:
        if stage.counted not in made:
            made[stage.counted] = stage_passes(site, stage)
    passes = [made[stage.counted] for stage in stages]
    ranks = stages_of(a)
    work = [sum(passes[i][0].total + passes[i][1].total for i in own) for own in ranks]
    dearest = max(range(a.pp), key=work.__getitem__)
    updates = [moving(_updated(a, sum(stages[i].trainable for i in own)), site.hardware) for own in ranks]
    timing.busy = [a.micro_batches * each + update for each, update in zip(work, updates, strict=True)]
    for i in ranks[dearest]:
        for part in passes[i]:
            _add_pass(timing, part, a.micro_batches)
    timing.add("bubble", _bubble(a, work, passes))
    hops = 2 * (a.pp - 1)
    size = max(stage.units[-1].output for stage in stages[:-1] if stage.units) / (a.tp if a.sequence else 1)
    timing.add("stages", hops * site.time("send", size, site.neighbour))
    busiest = max(stages, key=lambda stage: stage.trainable)
    if a.data > 1:
        timing.add("data", _gradient_sum(site, busiest.trainable * a.virtual))
    if a.gathers:
        timing.add("data", site.time("all_gather", busiest.elements * a.virtual * a.compute_bytes, site.shard))


def _bubble(a: Arrangement, work: list[float], passes: list[tuple[Pass, Pass]]) -> float:
    """Seconds that the dearest rank waits for others in one step."""
    others = sum(work) - max(work)
    if a.schedule == "layers":
        return a.micro_batches * others
    if a.schedule == "interleaved":
        return others / a.virtual
    if a.schedule == "zb":
        # The weights' part of backward, about a third of the work, fills the gap.
        return others / 3
    if a.schedule in ("zbv", "dualpipev"):
        return others / 6
    return others


def _add_pass(timing: Timing, part: Pass, times: int) -> None:
    timing.add("compute", part.compute * times)
    timing.add("tensor", part.tensor * times)
    timing.add("host", part.host * times)


def _update(timing: Timing, site: Site, stages: tuple[StageLoad, ...]) -> None:
    a, h = site.arrangement, site.hardware
    busiest = max(stage.trainable for stage in stages) * a.virtual
    own = busiest / a.optimizer_over
    timing.add("update", moving(_updated(a, busiest), h))
    if a.offload:
        moved = own * (a.gradient_bytes + a.parameter_bytes)
        timing.add("host copies", moved / h.host.bandwidth + own * UPDATE_BYTES / (HOST_BANDWIDTH / site.per_node))
    if a.optimizer_over > 1 and not a.gathers:
        timing.add("data", site.time("all_gather", busiest * a.compute_bytes, site.shard))


def _updated(a: Arrangement, elements: int) -> float:
    """Bytes that the optimizer reads and writes."""
    return elements / a.optimizer_over * UPDATE_BYTES


HOST_BANDWIDTH = 2e11
"""Bytes a second of a two-socket server's memory, which its devices share: eight channels of DDR4-3200 a socket."""
