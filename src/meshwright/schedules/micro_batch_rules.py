"""Which numbers of micro-batches a schedule can run, and the nearest valid ones."""

from __future__ import annotations

from itertools import count

from meshwright.errors import Refused
from meshwright.schedules.families import Family, find_family


def refuse(name: str, ranks: int, micro_batches: int) -> str | None:
    """Why a schedule cannot run this number of micro-batches, with the nearest valid ones; None if it can."""
    family = find_family(name)
    _check_ranks(name, ranks)
    if _allowed(family, ranks, micro_batches):
        return None
    fits = " or ".join(str(number) for number in _neighbours(family, ranks, micro_batches))
    found = f"{name} on {ranks} ranks cannot run {micro_batches} micro-batches"
    return f"{found}: it needs {family.demand}; use {fits}."


def least_micro_batches(name: str, ranks: int) -> int:
    """The smallest number of micro-batches that a schedule can run."""
    return micro_batches_near(name, ranks, 1)


def micro_batches_near(name: str, ranks: int, wanted: int) -> int:
    """The valid number of micro-batches nearest to `wanted`; in a tie the larger one, which idles less."""
    family = find_family(name)
    _check_ranks(name, ranks)
    if _allowed(family, ranks, wanted):
        return wanted
    return min(_neighbours(family, ranks, wanted), key=lambda number: (abs(number - wanted), -number))


def _neighbours(family: Family, ranks: int, wanted: int) -> list[int]:
    """The next valid number below, if there is one, and above: large multiples of the ranks are always valid."""
    below = next((number for number in range(wanted - 1, 0, -1) if _allowed(family, ranks, number)), None)
    above = next(number for number in count(max(1, wanted + 1)) if _allowed(family, ranks, number))
    return [above] if below is None else [below, above]


def _allowed(family: Family, ranks: int, micro_batches: int) -> bool:
    return micro_batches >= 1 and family.allows(ranks, micro_batches)


def _check_ranks(name: str, ranks: int) -> None:
    if ranks < 1:
        raise Refused(f"{name} got {ranks} pipeline ranks; it needs at least 1.")
