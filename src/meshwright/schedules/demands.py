"""How many micro-batches a schedule can run with, and which numbers are near where it cannot."""

from __future__ import annotations

from itertools import count

from meshwright.errors import Refused
from meshwright.schedules.families import Family, find_family


def refuse(name: str, ranks: int, micro_batches: int) -> str | None:
    """Why a schedule cannot run so many micro-batches, with the nearest numbers that would do; None where it can."""
    family = find_family(name)
    _check_ranks(name, ranks)
    if _allowed(family, ranks, micro_batches):
        return None
    fits = " or ".join(str(number) for number in _neighbours(family, ranks, micro_batches))
    found = f"{name} on {ranks} ranks cannot run {micro_batches} micro-batches"
    return f"{found}: it needs {family.demand}; {fits} would do."


def least_micro_batches(name: str, ranks: int) -> int:
    """The smallest number of micro-batches that a schedule runs with."""
    return micro_batches_near(name, ranks, 1)


def micro_batches_near(name: str, ranks: int, wanted: int) -> int:
    """The number nearest to a wanted one that a schedule runs with; of two as near, the larger, which idles less."""
    family = find_family(name)
    _check_ranks(name, ranks)
    if _allowed(family, ranks, wanted):
        return wanted
    return min(_neighbours(family, ranks, wanted), key=lambda number: (abs(number - wanted), -number))


def _neighbours(family: Family, ranks: int, wanted: int) -> list[int]:
    """The next number down, where there is one, and the next one up: large multiples of the ranks always do."""
    below = next((number for number in range(wanted - 1, 0, -1) if _allowed(family, ranks, number)), None)
    above = next(number for number in count(max(1, wanted + 1)) if _allowed(family, ranks, number))
    return [above] if below is None else [below, above]


def _allowed(family: Family, ranks: int, micro_batches: int) -> bool:
    return micro_batches >= 1 and family.allows(ranks, micro_batches)


def _check_ranks(name: str, ranks: int) -> None:
    if ranks < 1:
        raise Refused(f"{name} was given {ranks} pipeline ranks; give it at least 1.")
