"""Rehearse one rank: build it as training does, in a fake world, and take real steps.

first     makes the optimizer's state and fills caches
measured  its memory is that of every later step
timed     nothing is counted, so that counting takes no time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from meshwright.assemble.batch import Batch, part
from meshwright.assemble.check import micro_steps_of
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World, fake_world
from meshwright.describe.observe import make_batch
from meshwright.describe.structure import map_tensors
from meshwright.errors import Refused
from meshwright.facts.job import Job
from meshwright.facts.rehearsal import FORWARD, OUT_OF_MEMORY, UPDATE, Moment, Rehearsal
from meshwright.rehearse.exhausted import bytes_wanted, is_exhausted, place_of_error
from meshwright.rehearse.meter import MemoryMeter, Peak, meter_for
from meshwright.rehearse.moments import ModuleHooks, models_of, watched
from meshwright.rehearse.task import RehearsalTask
from meshwright.runtime.profile_step import synchronize
from meshwright.strategies.norm import local
from meshwright.strategies.pipeline.sizes import is_pipelined

Tell = Callable[[str], None]
FILLED = 1 << 30
"""Bytes of parameters up to which a rank gets the job's initial weights; larger models get made-up ones, faster."""
SHORT, LONGER = 2, 4
"""Micro-batches of the steps that a longer step's time is extrapolated from."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The steps that are taken in place of one with many micro-batches."""

    micro_batches: int
    counts: tuple[int, ...]
    """Micro-batches of the timed steps; the first is that of the measured one."""

    @property
    def is_short(self) -> bool:
        return self.counts[0] < self.micro_batches

    def seconds(self, times: list[float]) -> float:
        """The time of a whole step from those of the timed ones."""
        if len(times) == 1:
            return times[0]
        each = (times[1] - times[0]) / (self.counts[1] - self.counts[0])
        return times[0] + each * (self.micro_batches - self.counts[0])


def rehearse(task: RehearsalTask, tell: Tell) -> Rehearsal:
    """Take the steps. Memory that runs out is a result; any other error is raised."""
    device = torch.device("cuda", 0) if task.device == "cuda" else torch.device("cpu")
    job = task.load()
    if device.type == "cpu":
        torch.set_flush_denormal(True)  # gathered tensors hold anything, and denormal numbers are slow
        if task.world > 1:
            torch.set_num_threads(1)  # as for a rank among others
    world = fake_world(task.world, device, rank=task.rank)
    size = sum(parameter.count * parameter.itemsize for parameter in task.facts.parameters)
    return RankRehearsal(task, job, replace(world, weightless=size > FILLED), tell).perform()


class RankRehearsal:
    """The steps of one task. Attributes exist as far as they were built when memory ran out."""

    def __init__(self, task: RehearsalTask, job: Job, world: World, tell: Tell) -> None:
        self._task, self._job, self._world, self._tell = task, job, world, tell
        self._meter = meter_for(world.device, task.limit)
        self._trainer: Trainer | None = None

    def perform(self) -> Rehearsal:
        name = torch.cuda.get_device_name() if self._world.device.type == "cuda" else "cpu"
        try:
            peak, times, notes = self._steps()
        except Exception as error:
            if not is_exhausted(error):
                raise
            return self._exhausted(error, name)
        return Rehearsal(device=name, notes=notes, **_memory(peak), **times)

    def _steps(self) -> tuple[Peak, dict[str, Any], tuple[str, ...]]:
        task, meter = self._task, self._meter
        with meter.counting():
            self._tell("building")
            job = watched(self._job, meter.enter)
            self._trainer = trainer = Trainer(job, task.facts, task.strategy, self._world, seed=0)
            if self._world.weightless:
                make_up_weights(trainer)
            plan = plan_steps(self._job, trainer)
            batch = own_part(self._job, trainer, plan.counts[0])
            self._tell("first step")
            measure_steps(trainer, batch, meter)
        peak = meter.peak()
        self._tell("timing")
        timed = [self._times(batch), *(self._times_of(count) for count in plan.counts[1:])]
        times = {"seconds": plan.seconds([*map(median, timed)]), "quickest": plan.seconds([*map(min, timed)])}
        notes = [f"Timed on {' and '.join(map(str, plan.counts))} of {plan.micro_batches} micro-batches."]
        return self._later(peak), times, tuple(notes) if plan.is_short else ()

    def _later(self, peak: Peak) -> Peak:
        """The peak with that of the timed steps, which a GPU counts as well."""
        later = self._meter.peak()
        return replace(later, moment=peak.moment, memory=peak.memory)

    def _times_of(self, count: int) -> list[float]:
        assert self._trainer is not None
        return self._times(own_part(self._job, self._trainer, count))

    def _times(self, batch: Batch) -> list[float]:
        assert self._trainer is not None
        return [_timed(self._trainer, batch) for _ in range(self._task.steps)]

    def _exhausted(self, error: BaseException, device: str) -> Rehearsal:
        meter = self._meter
        names = [] if self._trainer is None else models_of(self._trainer)
        if self._trainer is not None:
            meter.tell_held(self._trainer)
        peak = meter.at_the_end()
        peak = replace(peak, moment=place_of_error(error, peak.moment, names))
        wanted = meter.wanted or bytes_wanted(error)
        return Rehearsal(
            status=OUT_OF_MEMORY,
            reason=f"Memory ran out in {peak.moment}.",
            device=device,
            wanted=wanted,
            **_memory(peak),
        )


def measure_steps(trainer: Trainer, batch: Batch, meter: MemoryMeter) -> None:
    """Two steps: after them, the meter's peak is that of the second. Also for ranks of a real world."""
    hooks = ModuleHooks(trainer, meter.enter)
    try:
        _step(trainer, batch, meter)
        meter.begin(trainer)
        skipped = _step(trainer, batch, meter)
    finally:
        hooks.remove()
    if skipped:
        raise Refused(
            f"The update of {trainer.strategy} was skipped, because its gradients overflow in a fake world; rehearse "
            "bf16 in place of fp16: it takes the same memory and time."
        )


def _step(trainer: Trainer, batch: Batch, meter: MemoryMeter) -> bool:
    """Take one step; whether its update was skipped."""
    meter.enter(Moment(phase=FORWARD))
    trainer.forward_backward(batch)
    meter.tell_held(trainer)
    meter.enter(Moment(phase=UPDATE))
    skipped = trainer.update().skipped
    meter.tell_held(trainer)
    return skipped


def _timed(trainer: Trainer, batch: Batch) -> float:
    synchronize(trainer.world.device)
    start = time.perf_counter()
    trainer.step(batch)
    synchronize(trainer.world.device)
    return time.perf_counter() - start


def plan_steps(job: Job, trainer: Trainer) -> StepPlan:
    """Fewer micro-batches than a long step has: memory is that of two, and time grows by the same for each."""
    count = micro_steps_of(job, trainer.strategy)
    is_long = count > LONGER and not is_pipelined(trainer.strategy) and trainer.strategy.micro_batch is not None
    return StepPlan(micro_batches=count, counts=(SHORT, LONGER) if is_long else (count,))


def own_part(job: Job, trainer: Trainer, micro_batches: int) -> Batch:
    """The rank's part of a made-up global batch, in memory of its own, with this number of micro-batches."""
    strategy, samples = trainer.strategy, job.global_batch
    if micro_batches < micro_steps_of(job, strategy):
        assert strategy.micro_batch is not None
        samples = micro_batches * strategy.micro_batch * strategy.data_ranks
    own = part(make_batch(job, samples), trainer.share, trainer.cutter, nominal=samples)
    pin = trainer.world.device.type == "cuda"
    copied = tuple(tuple(replace(piece, data=_copied(piece.data, pin)) for piece in round_) for round_ in own.rounds)
    return replace(own, rounds=copied, whole=None)


def _copied(data: Any, pin: bool) -> Any:
    return map_tensors(lambda tensor: tensor.pin_memory() if pin else tensor.clone(), data)


@torch.no_grad()
def make_up_weights(trainer: Trainer) -> None:
    """Small numbers, made on the device: filling billions of weights from a seed takes minutes."""
    for tensor in _tensors(trainer):
        if tensor.is_floating_point():
            tensor.normal_(std=0.02)
        else:
            tensor.zero_()
    trainer.engine.loaded()


def _tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    for held in trainer.engine.held():
        yield local(held.tensor)
    for model in models_of(trainer):
        yield from (buffer for buffer in map(local, model.buffers()) if not buffer.is_meta)


def _memory(peak: Peak) -> dict[str, Any]:
    return {
        "peak": peak.allocated,
        "reserved": peak.reserved,
        "memory": dict(peak.memory),
        "peak_at": peak.moment,
        "retries": peak.retries,
    }
