"""Check that a schedule does all of its work, exactly once, and on the rank that holds the stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.schedules.action import Action, Kind
from meshwright.schedules.errors import ScheduleError
from meshwright.schedules.schedule import Schedule

_PARTS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_SHOWN = 4  # actions listed in one message


def check_complete(schedule: Schedule) -> None:
    """Raise unless every stage and micro-batch has one F, and either one B or one I and one W.

    The order of W after I is not checked here; the simulation does that.
    """
    found = Counter(part for rank in range(schedule.ranks) for a in schedule.actions_of(rank) for part in a.parts)
    wanted = set(_wanted(schedule))
    strange = [part for part in found if part not in wanted]
    repeated = [part for part, times in found.items() if times > 1]
    missing = [part for part in _wanted(schedule) if part not in found]
    misplaced = [
        action
        for rank in range(schedule.ranks)
        for action in schedule.actions_of(rank)
        if schedule.rank_of(action.stage) != rank
    ]
    for actions, complaint in (
        (strange, f"has actions outside its {schedule.stages} stages and {schedule.micro_batches} micro-batches"),
        (misplaced, "has actions on a rank that does not hold their stage"),
        (repeated, "does work twice (a B is an I and a W)"),
        (missing, "misses work (a B is an I and a W)"),
    ):
        if actions:
            raise ScheduleError(f"{schedule.name} {complaint}: {_list(actions)}.")


def _wanted(schedule: Schedule) -> Iterator[Action]:
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            yield from (Action(stage, kind, micro_batch) for kind in _PARTS)


def _list(actions: list[Action]) -> str:
    more = f" and {len(actions) - _SHOWN} more" if len(actions) > _SHOWN else ""
    return ", ".join(map(str, actions[:_SHOWN])) + more
