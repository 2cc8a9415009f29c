"""A pipeline schedule as a value: what each rank does, in order. It prints as a grid, and the grid parses back.

        1f1b ranks=2 virtual=1 micro_batches=2 placement=loop
        rank 0  0F0 0F1 .   0B0 .   0B1
        rank 1  .   1F0 1B0 1F1 1B1 .

Time runs to the right, one column per step; a dot is an idle step; `0F4;3B1` is a pair that may overlap.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from meshwright.schedules.action import Action, Kind, ScheduleError, Slot

Placement = Literal["loop", "v"]

_IDLE, _PAIR = ".", ";"
_HEADER = re.compile(
    r"(?P<name>\S+) ranks=(?P<ranks>\d+) virtual=(?P<virtual>\d+) micro_batches=(?P<micro_batches>\d+)"
    r" placement=(?P<placement>\w+)",
    re.ASCII,
)
_PARTS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_SHOWN = 4  # actions listed in one message
_EXAMPLE = "1f1b ranks=4 virtual=1 micro_batches=8 placement=loop"


@dataclass(frozen=True, kw_only=True)
class ScheduleShape:
    """The size of a schedule."""

    ranks: int
    """Pipeline ranks."""
    virtual: int = 1
    """Stages on each rank."""
    micro_batches: int

    def __post_init__(self) -> None:
        for name in ("ranks", "virtual", "micro_batches"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise ScheduleError(f"{name} is {number!r}, but must be an integer of at least 1.")

    @property
    def stages(self) -> int:
        """Stages on all ranks together."""
        return self.ranks * self.virtual


@dataclass(frozen=True, kw_only=True)
class Schedule(ScheduleShape):
    """All ranks' actions on a common time grid; `parse(str(schedule)) == schedule`."""

    name: str
    placement: Placement = "loop"
    """How stages map to ranks: "loop" starts each round at rank 0 again, "v" turns back at the last rank."""
    rows: tuple[tuple[Slot, ...], ...]
    """For each rank, what it does at each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"\S+", self.name):
            raise ScheduleError(f"A schedule's name must be one word, not {self.name!r}.")
        if self.placement not in get_args(Placement):
            raise ScheduleError(f"A schedule's placement must be loop or v, not {self.placement!r}.")
        if len(self.rows) != self.ranks:
            raise ScheduleError(f"{self.name} has {self.ranks} ranks but {len(self.rows)} rows; give each rank a row.")
        if len({len(row) for row in self.rows}) > 1:
            lengths = ", ".join(str(len(row)) for row in self.rows)
            raise ScheduleError(f"{self.name} has rows of {lengths} steps; pad the shorter ones with idle steps.")

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the grid that `str` prints."""
        lines = [line for line in text.splitlines() if line.strip()]
        header = _HEADER.fullmatch(lines[0].strip()) if lines else None
        if header is None:
            found = repr(lines[0]) if lines else "nothing"
            raise ScheduleError(f"A schedule must start with a line like {_EXAMPLE!r}, but starts with {found}.")
        return cls(
            name=header["name"],
            ranks=int(header["ranks"]),
            virtual=int(header["virtual"]),
            micro_batches=int(header["micro_batches"]),
            placement=header["placement"],  # type: ignore[arg-type]  # __post_init__ checks the word
            rows=tuple(_read_row(rank, line) for rank, line in enumerate(lines[1:])),
        )

    def __str__(self) -> str:
        sizes = f"ranks={self.ranks} virtual={self.virtual} micro_batches={self.micro_batches}"
        return "\n".join([f"{self.name} {sizes} placement={self.placement}", *_grid(self.rows)])

    def rank_of(self, stage: int) -> int:
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.placement == "v" and turn % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, first to last."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def actions_of(self, rank: int) -> tuple[Action, ...]:
        """What a rank does, in order, without its idle steps."""
        return tuple(action for slot in self.rows[rank] for action in slot)


def _grid(rows: tuple[tuple[Slot, ...], ...]) -> Iterator[str]:
    cells = [[_PAIR.join(map(str, slot)) or _IDLE for slot in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    margin = len(f"rank {len(rows) - 1}")
    for rank, row in enumerate(cells):
        line = " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{f'rank {rank}':{margin}}  {line}".rstrip()


def _read_row(rank: int, line: str) -> tuple[Slot, ...]:
    words = line.split()
    if words[:2] != ["rank", str(rank)]:
        raise ScheduleError(f"The next row must start with 'rank {rank}', but it is {line.strip()!r}.")
    return tuple(() if cell == _IDLE else tuple(map(Action.parse, cell.split(_PAIR))) for cell in words[2:])


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
