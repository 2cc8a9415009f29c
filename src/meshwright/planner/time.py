"""Seconds of one step by cause: compute, the host, each axis's exposed communication, idle stages, the update.

Compute and communication streams run concurrently, so exposed communication is computed, not assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.facts.hardware import Hardware
from meshwright.planner.cpu_pipeline import idle_seconds
from meshwright.planner.gradient_sums import exposed_sums, gradient_sum, summed_in_buckets
from meshwright.planner.kernels import moving_in_order
from meshwright.planner.site import Site
from meshwright.planner.stage_costs import StageCosts
from meshwright.planner.stage_pass import Pass, sending, stage_passes
from meshwright.planner.stage_work import StageWork
from meshwright.planner.step_layout import StepLayout, stages_of
from meshwright.schedules import FAMILIES

UPDATE_BYTES = 28
"""Bytes per element in a fused Adam step: parameter, gradient and two moments are read, all but gradients written."""
STALLED_BUCKETS = 3
"""DDP's buckets that stall one after the other where messages do (published sweep on 64 nodes: 1 to 8)."""
LOSS_WAITS = 0.5
"""Share of a loss on a stage by itself that the stage before it waits for (published sweep on H100 nodes, 1B decoders
in 8 stages and 3B ones in 16: 0.3 to 1.0 on several nodes, none within one)."""
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
        return self.waiting > 0

    @property
    def waiting(self) -> float:
        """The share of the step that devices wait for their hosts during micro-batches."""
        return (self.parts.get("host", 0.0) - self.waits) / self.total if self.total else 0.0


def forecast_time(step_layout: StepLayout, stage_costs: StageCosts, hardware: Hardware, per_node: int) -> Timing:
    """Forecast the seconds of a step; `Refused` if the model cannot be cut into the stages."""
    site = Site(
        hardware=hardware,
        per_node=per_node,
        step_layout=step_layout,
        collective=stage_costs.collective,
        prices=stage_costs.prices,
    )
    stages = stage_costs.of(step_layout)
    timing = Timing()
    if step_layout.stage_ranks > 1:
        _pipeline(timing, site, stages)
        timing.add("stages", _tied_sums(site, stage_costs.tied(step_layout)))
    elif step_layout.gathers:
        _gathering(timing, site, stages[0])
    else:
        _plain(timing, site, stages[0])
    _update(timing, site, stages)
    if site.data.nodes > 1:
        timing.add("data", site.stall * (STALLED_BUCKETS if _in_buckets(step_layout) else 1))
    timing.waits = _host_of_update(site, stages)
    timing.add("host", timing.waits)
    return timing


def _host_of_update(site: Site, stages: tuple[StageWork, ...]) -> float:
    """Host seconds once per step, while the device waits."""
    layout, host = site.step_layout, site.host
    if layout.graphs:
        return host.step_of_graphs
    fullest = max(stages, key=lambda stage: stage.tensors)
    found = host.step + host.tensor * fullest.tensors
    if layout.gathers or layout.optimizer_over == 1:
        return found
    units = sum(times for unit, times in fullest.counted if unit.elements)
    return found + units * host.bucket[1] + fullest.tensors * host.piece[1]


def _in_buckets(layout: StepLayout) -> bool:
    """Whether gradients are summed in buckets while backward runs, as DDP does."""
    return layout.overlaps and layout.optimizer_over == 1


def _plain(timing: Timing, site: Site, stage: StageWork) -> None:
    """Add the time of a step with whole parameters on every rank."""
    layout = site.step_layout
    forward, backward = stage_passes(site, stage)
    timing.add_passes(layout.micro_batches, forward, backward)
    if layout.overlaps:
        sent = exposed_sums(site, stage, backward.total)
    else:
        sent = gradient_sum(site, stage.trainable, stage.inside)
    # In one process, broadcasting parameters and reducing gradients cost an all-reduce per micro-batch.
    times = layout.micro_batches if layout.one_process or layout.reduces_each else 1
    timing.add("data", times * sent if layout.reduced > 1 else 0.0)


def _gathering(timing: Timing, site: Site, stage: StageWork) -> None:
    """Add the time of an FSDP step."""
    forward, backward = stage_passes(site, stage)
    timing.add_passes(site.step_layout.micro_batches, forward, backward)
    if site.is_cpu:
        timing.add("data", _gathering_alone(site, stage))
        return
    # Links catch up while the device waits for the host.
    caught_up = site.step_layout.micro_batches * (forward.host + backward.host)
    timing.add("data", max(0.0, _gathering_beside(site, stage) - caught_up))


def _gathering_beside(site: Site, stage: StageWork) -> float:
    """Exposed seconds on GPUs: gathers overlap with the previous block, gradient sums with the next."""
    layout = site.step_layout
    if stage.is_one_unit:
        return _gathering_alone(site, stage)
    moves = {
        unit.name: (
            _gather(site, unit.elements, unit.inside),
            gradient_sum(site, unit.trainable, unit.inside) if unit.trainable else 0.0,
            [
                sum(sending(site, group, own[way]) for (_, group), own in zip(site.inner, unit.sent, strict=True))
                for way in (0, 1)
            ],
        )
        for unit, _ in stage.counted
    }
    ahead = [(unit.forward + moves[unit.name][2][0], moves[unit.name][0], 0.0) for unit in stage.units]
    regathers = 1.0 if layout.reshards else 0.0
    last = [
        (unit.backward + sends[1], regathers * gather, reduce)
        for unit, (gather, reduce, sends) in ((unit, moves[unit.name]) for unit in reversed(stage.units))
    ]
    back = [(compute, gather, reduce if layout.reduces_each else 0.0) for compute, gather, reduce in last]
    return layout.micro_batches * _exposed(ahead) + (layout.micro_batches - 1) * _exposed(back) + _exposed(last)


def _gathering_alone(site: Site, stage: StageWork) -> float:
    """Seconds of all messages, if nothing is computed meanwhile: a CPU has no streams, so FSDP2 does not overlap there.

    What is in no shard unit is gathered together and stays gathered until the end of backward.
    """
    layout = site.step_layout
    gathered, reduced = _gather(site, stage.around, 0), gradient_sum(site, stage.around)
    for unit, times in stage.counted:
        if unit.in_units:
            inside = min(unit.inside, unit.in_units)
            gathered += (2 if layout.reshards else 1) * times * _gather(site, unit.in_units, inside)
            reduced += times * gradient_sum(site, min(unit.trainable, unit.in_units), inside)
    return layout.micro_batches * gathered + (layout.micro_batches if layout.reduces_each else 1) * reduced


def _gather(site: Site, elements: int, inside: int) -> float:
    """Seconds of gathering parameters, of which `inside` are shared by fewer ranks."""
    low = site.step_layout.compute_bytes
    rest = site.time("all_gather", (elements - inside) * low, site.shard)
    return rest + site.time("all_gather", inside * low, site.inside) if inside else rest


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
    # Hosts wait for each other's messages once the pipeline is full, not while it fills and drains.
    calm = [
        sum(passes[i][0].total + passes[i][1].total - passes[i][0].late - passes[i][1].late for i in own)
        for own in ranks
    ]
    waits = _waits_for_loss(stages, work)
    slowest = max(range(layout.stage_ranks), key=lambda rank: work[rank] + waits[rank])
    timing.add("bubble", layout.micro_batches * waits[slowest])
    held = [(sum(stages[i].trainable for i in own), sum(stages[i].inside for i in own)) for own in ranks]
    updates = [_updating(site, *own) for own in held]
    timing.busy = [layout.micro_batches * each + update for each, update in zip(work, updates, strict=True)]
    for i in ranks[slowest]:
        timing.add_passes(layout.micro_batches, *passes[i])
    lost = _stalls(site)
    timing.stalled = lost > 0
    idle, sent = idle_seconds(site, stages, passes) if site.is_cpu else _idle_and_sent(site, stages, calm)
    timing.add("bubble", idle)
    timing.add("stages", lost + sent)
    busiest = max(stages, key=lambda stage: stage.trainable)
    if layout.reduced > 1:
        # After a micro-batch's backward the stage waits for the sum; what zero2 has sent by then is left out.
        times = layout.micro_batches if layout.reduces_each else 1
        elements, inside = busiest.trainable * layout.virtual, busiest.inside * layout.virtual
        buckets = _in_buckets(layout)
        summed = summed_in_buckets(site, elements) if buckets else gradient_sum(site, elements, inside)
        timing.add("data", times * summed)
    if layout.gathers:
        timing.add("data", _gather(site, busiest.elements * layout.virtual, busiest.inside * layout.virtual))


def _tied_sums(site: Site, tied: list[tuple[tuple[int, ...], int, int]]) -> float:
    """Seconds of summing gradients of parameters that several stages hold, such as an embedding tied to the output."""
    layout, own = site.step_layout, stages_of(site.step_layout)
    total, over = 0.0, 1 if layout.sums_ties_whole else layout.optimizer_over
    for members, elements, inside in tied:
        places = [place for place, stages in enumerate(own) if not set(stages).isdisjoint(members)]
        size = layout.per_rank(elements, inside, over) * layout.gradient_bytes
        total += site.time("all_reduce", size, site.stage_group(*places))
    return total


def _waits_for_loss(stages: tuple[StageWork, ...], work: list[float]) -> list[float]:
    """Seconds per micro-batch that each rank waits for a last stage which has nothing but the loss.

    The two stages send logits back and forth, so that one computes while the other does for a part of the time only.
    """
    if len(stages) != len(work) or stages[-1].elements:
        return [0.0] * len(work)
    return [*(0.0 for _ in work[:-2]), LOSS_WAITS * work[-1], 0.0]


def _idle_and_sent(site: Site, stages: tuple[StageWork, ...], work: list[float]) -> tuple[float, float]:
    """Seconds that the slowest rank waits for the others, and for messages: once through all stages and back."""
    hops = 2 * (site.step_layout.stage_ranks - 1)
    sent = hops * site.time("send", max(stage.output for stage in stages[:-1]), site.neighbour)
    return _bubble(site.step_layout, work), sent


def _stalls(site: Site) -> float:
    """Seconds that messages between stages lose on a stalled path: those of a rank with neighbours on both sides."""
    layout = site.step_layout
    neighbours = min(2, layout.stage_ranks - 1)
    return 2 * neighbours * layout.virtual * layout.micro_batches * site.stage_stall


def _bubble(layout: StepLayout, work: list[float]) -> float:
    """Seconds that the slowest rank waits for the others in one step."""
    others, family = sum(work) - max(work), FAMILIES[layout.schedule]
    return layout.micro_batches * others if family.one_at_a_time else others / family.gap_divisor


def _update(timing: Timing, site: Site, stages: tuple[StageWork, ...]) -> None:
    layout, hardware = site.step_layout, site.hardware
    fullest = max(stages, key=lambda stage: stage.trainable)
    busiest, inside = fullest.trainable * layout.virtual, fullest.inside * layout.virtual
    own = layout.per_rank(busiest, inside, layout.optimizer_over)
    timing.add("update", _updating(site, busiest, inside))
    if layout.offload:
        moved = own * (layout.gradient_bytes + layout.parameter_bytes)
        timing.add(
            "host copies", moved / hardware.host.bandwidth + own * UPDATE_BYTES / (HOST_BANDWIDTH / site.per_node)
        )
    if layout.optimizer_over > 1 and not layout.gathers:
        timing.add("data", site.time("all_gather", busiest * layout.compute_bytes, site.shard))


def _updating(site: Site, elements: int, inside: int) -> float:
    """Seconds of updating a rank's share of the elements, as measured or by the optimizer's memory traffic."""
    own = site.step_layout.per_rank(elements, inside, site.step_layout.optimizer_over)
    measured = site.prices.update(own) if site.prices is not None else None
    if measured is not None:
        return measured
    return moving_in_order(own * (UPDATE_BYTES + site.host.clip_bytes), site.hardware)
