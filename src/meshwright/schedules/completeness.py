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
    actions = [(rank, action) for rank in range(schedule.ranks) for action in schedule.actions_of(rank)]
    found = Counter(part for _, action in actions for part in action.parts)
    expected = dict.fromkeys(_expected(schedule))
    unknown = [part for part in found if part not in expected]
    repeated = [part for part, times in found.items() if times > 1]
    missing = [part for part in expected if part not in found]
    misplaced = [action for rank, action in actions if schedule.rank_of(action.stage) != rank]
    for wrong, complaint in (
        (unknown, f"has actions outside its {schedule.stages} stages and {schedule.micro_batches} micro-batches"),
        (misplaced, "has actions on a rank that does not hold their stage"),
        (repeated, "does work twice (a B is an I and a W)"),
        (missing, "misses work (a B is an I and a W)"),
    ):
        if wrong:
            raise ScheduleError(f"{schedule.name} {complaint}: {_list(wrong)}.")


def _expected(schedule: Schedule) -> Iterator[Action]:
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            yield from (Action(stage, kind, micro_batch) for kind in _PARTS)


def _list(actions: list[Action]) -> str:
    more = f" and {len(actions) - _SHOWN} more" if len(actions) > _SHOWN else ""
    return ", ".join(map(str, actions[:_SHOWN])) + more
