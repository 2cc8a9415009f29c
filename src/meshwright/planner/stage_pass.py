"""Seconds of a stage's forward and backward for one micro-batch: compute, messages of inner axes, and the host."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from meshwright.planner.collectives import RankGroup
from meshwright.planner.kernels import moving_in_order
from meshwright.planner.site import Site
from meshwright.planner.stage_work import StageWork, UnitWork
from meshwright.strategies.model_axis import Sent


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of a stage's forward or backward for one micro-batch."""

    compute: float
    sent: dict[str, float]
    """Exposed communication of each inner axis, by the name of its mesh axis."""
    host: float
    """Host seconds beyond both."""
    late: float = 0.0
    """How many of these are lost in collectives to hosts that arrive late."""

    @property
    def total(self) -> float:
        return self.compute + sum(self.sent.values()) + self.host

    @property
    def parts(self) -> dict[str, float]:
        return {"compute": self.compute, **self.sent, "host": self.host}


def stage_passes(site: Site, stage: StageWork) -> tuple[Pass, Pass]:
    """Forward and backward of one micro-batch on one stage."""
    return _pass(site, stage, backward=False), _pass(site, stage, backward=True)


def _pass(site: Site, stage: StageWork, *, backward: bool) -> Pass:
    compute = host_total = late_total = 0.0
    sent = dict.fromkeys(site.causes, 0.0)
    axes = [(term.traits.mesh_name, group, _lateness(site, group)) for term, group in site.inner]
    for unit, times in stage.counted:
        compute += times * ((unit.backward if backward else unit.forward) + _preparing(site, unit, backward=backward))
        host = _launching(site, unit, backward=backward)
        for (cause, group, late), own in zip(axes, unit.sent, strict=True):
            sent[cause] += times * sending(site, group, own[backward])
            meetings = sum(message.times for message in own[backward])
            copied = sum(message.times * message.bytes for message in own[backward]) * site.host.copied
            host += meetings * (site.host.collective + late) + copied
            late_total += times * meetings * late
        host_total += times * host
    if backward:
        compute += _accumulating(site, stage.trainable)
    host_total += site.host.neighbour * (site.step_layout.stage_ranks > 1)
    host_total += _sharded_host(site, stage, backward=backward)
    # A CPU rank is its own host: nothing that it does runs beside its computing.
    hidden = 0.0 if site.is_cpu else compute + sum(sent.values())
    host = max(0.0, host_total - hidden)
    return Pass(compute=compute, sent=sent, host=host, late=min(host, late_total))


def _launching(site: Site, unit: UnitWork, *, backward: bool) -> float:
    """Host seconds of launching a unit's kernels."""
    layout = site.step_layout
    launches = unit.backward_launches if backward else unit.forward_launches
    if layout.graphs:
        return launches * site.host.node
    if unit.host is not None:
        return _timed_host(site, unit, unit.host, backward=backward)
    plain = each = site.hardware.launch + site.host.operator
    if unit.intercepted:
        each += site.host.divided[backward]
    # Casts of all parameters at once launch less, but the host's costs were fitted to steps that cast each alone.
    casts = unit.tensors if layout.cast_bytes else 0
    if layout.recompute == "none" or layout.compile or not unit.is_block:  # compiled code recomputes by itself
        return launches * each + casts * plain
    if layout.recompute == "selective":
        return launches * each + casts * plain + (unit.forward_launches + casts) * site.host.selected
    again = casts * plain + site.host.repeated if backward else 0.0
    return launches * each + casts * plain + again


def _timed_host(site: Site, unit: UnitWork, own: tuple[float, float], *, backward: bool) -> float:
    """Host seconds of a unit whose own pass was timed. A CPU's kernels were measured with their launches."""
    layout = site.step_layout
    launch = 0.0 if site.is_cpu and site.prices is not None else site.hardware.launch
    launches = unit.backward_launches if backward else unit.forward_launches
    casts = unit.tensors * (site.hardware.launch + site.host.operator) if layout.cast_bytes else 0.0
    divided = launches * site.host.divided[backward] * unit.intercepted
    found = own[backward] + unit.launching[backward] * launch + divided + casts
    if layout.recompute == "none" or not unit.is_block:
        return found
    if layout.recompute == "selective":
        return found + unit.forward_launches * site.host.selected
    return found + (own[0] + site.host.repeated if backward else 0.0)


def _preparing(site: Site, unit: UnitWork, *, backward: bool) -> float:
    """Device seconds of casting or copying a unit's parameters before they are read."""
    layout = site.step_layout
    if layout.cast_bytes and not backward:
        passes = 1 if layout.graphs else layout.micro_batches
        return moving_in_order(unit.elements * (layout.parameter_bytes + layout.compute_bytes), site.hardware) / passes
    if layout.gathers and site.host.gathers_by_copy and (layout.reshards or not backward):
        return moving_in_order(unit.elements * 2 * layout.compute_bytes, site.hardware)
    return 0.0


def _sharded_host(site: Site, stage: StageWork, *, backward: bool) -> float:
    """Host seconds of the data axis's collectives in one micro-batch."""
    layout = site.step_layout
    if layout.shards == 1:
        return 0.0
    gathers = layout.gathers and (layout.reshards or not backward)
    reduces = backward / (1 if layout.reduces_each else layout.micro_batches)  # or in the last micro-batch only
    if site.is_cpu:
        units = sum(times for unit, times in stage.counted if unit.in_units) + bool(stage.around)
    else:  # the constants of GPUs were fitted to this count
        units = sum(times for unit, times in stage.counted if unit.elements)
    if layout.gathers or not reduces:
        return units * site.host.shard * (gathers + reduces)
    return reduces * (units * site.host.bucket[0] + stage.tensors * site.host.piece[0])


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
        return moving_in_order(elements * (cast + added), site.hardware)
    # Where ranks keep whole sums, these are rounded to be sent and cast back, once a step.
    rounded = layout.optimizer_over == 1 and layout.reduce_bytes < layout.gradient_bytes
    back = 2 * rounded * (layout.gradient_bytes + layout.reduce_bytes) / layout.micro_batches
    return moving_in_order(elements * (layout.compute_bytes + 2 * layout.gradient_bytes + back), site.hardware)


def _lateness(site: Site, group: RankGroup) -> float:
    """Seconds by which the last host is late for one collective of an inner axis."""
    layout, host = site.step_layout, site.host
    if layout.compile or layout.stage_ranks == 1 or site.neighbour.nodes == 1:
        return 0.0
    alone: float = host.stall * group.ranks**host.growth * (host.apart if group.nodes > 1 else 1.0)
    return alone * (1 + host.crowding * log2(layout.data))


def sending(site: Site, group: RankGroup, messages: tuple[Sent, ...]) -> float:
    wait = site.wait(group)
    return sum(message.times * (wait + site.time(message.kind, message.bytes, group)) for message in messages)
