"""Seconds that a pipeline of CPU ranks idles and waits for messages, by simulating its schedule.

Between GPUs a message takes a small part of what a stage computes, and closed forms do (`planner/time.py`). CPU ranks
are joined by gloo and often by a slow network: each round trip of a micro-batch delays the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from meshwright.planner.site import Site
from meshwright.planner.stage_pass import Pass
from meshwright.planner.stage_work import StageWork
from meshwright.schedules import Schedule, make, simulate


def idle_seconds(site: Site, stages: Sequence[StageWork], passes: Sequence[tuple[Pass, Pass]]) -> tuple[float, float]:
    """Seconds of a step beyond the work of its busiest rank: idle if messages took no time, and because they do."""
    layout = site.step_layout
    schedule = _schedule(layout.schedule, layout.stage_ranks, layout.micro_batches, layout.virtual)
    sends = [_send(site, schedule, stage, work.output) for stage, work in enumerate(stages[:-1])]
    halves = [backward.total / 2 for _, backward in passes]
    play = partial(
        simulate,
        schedule,
        forward=[forward.total for forward, _ in passes],
        backward_input=halves,
        backward_weight=halves,
    )
    idle, late = play(), play(send=lambda source, target: sends[min(source, target)])
    # A link carries one message after the other.
    total = max(late.total, layout.micro_batches * max(sends, default=0.0))
    return idle.total - max(idle.busy), total - idle.total


@lru_cache(maxsize=256)
def _schedule(name: str, ranks: int, micro_batches: int, virtual: int) -> Schedule:
    return make(name, ranks, micro_batches, virtual=virtual)


def _send(site: Site, schedule: Schedule, stage: int, size: float) -> float:
    """Seconds from a stage to the next one."""
    ranks = schedule.rank_of(stage), schedule.rank_of(stage + 1)
    if ranks[0] == ranks[1]:
        return 0.0
    return site.time("send", size, site.stage_group(*ranks))
