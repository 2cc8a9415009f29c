"""Timeline of one step of a pipeline, forecast or measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshwright.facts import html
from meshwright.units import show_seconds

FORWARD, BACKWARD, INPUT, WEIGHT = "forward", "backward", "backward for inputs", "backward for weights"
SEND, DATA, UPDATE, IDLE = "send", "data axis", "update", "idle"
KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT, SEND, DATA, UPDATE, IDLE)
"""Kinds of pieces, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One interval of a rank's timeline."""

    rank: int
    kind: str
    """One of KINDS. Sends overlap with computing; all other kinds exclude each other."""
    start: float
    """Seconds since the start of the step, as is `end`."""
    end: float
    stage: int | None = None
    micro_batch: int | None = None
    to: int | None = None
    """The receiving rank of a send."""
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Seconds by cause, if known."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Unknown kind {self.kind!r} of a timeline's piece; kinds are {', '.join(KINDS)}.")

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def to_json(self) -> dict[str, Any]:
        optional = {
            "stage": self.stage,
            "micro_batch": self.micro_batch,
            "to": self.to,
            "parts": dict(self.parts) or None,
        }
        known = {key: value for key, value in optional.items() if value is not None}
        return {"rank": self.rank, "kind": self.kind, "start": self.start, "end": self.end, **known}


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a pipeline, rank by rank."""

    strategy: str
    schedule: str
    ranks: int
    """Ranks of the pipeline; each represents all ranks of its stage."""
    micro_batches: int
    origin: str = "forecast"
    """"forecast" or "measured"."""
    pieces: tuple[Piece, ...]
    """Sorted by rank and time."""

    @cached_property
    def total(self) -> float:
        """Seconds until the last rank finishes."""
        return max((piece.end for piece in self.pieces), default=0.0)

    @property
    def idle(self) -> float:
        """Idle share of all ranks' time."""
        waited = sum(piece.seconds for piece in self.pieces if piece.kind == IDLE)
        return waited / (self.ranks * self.total) if self.total else 0.0

    def of(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of one rank."""
        return tuple(piece for piece in self.pieces if piece.rank == rank)

    def _repr_html_(self) -> str:
        """For notebooks: a lane for each rank; sends overlap with computing and are left out."""
        rows = [
            [(one.kind, one.start, one.end) for one in self.of(rank) if one.kind not in (SEND, IDLE)]
            for rank in range(self.ranks)
        ]
        words = f"{show_seconds(self.total)} per step, {self.micro_batches} micro-batches, {self.idle:.1%} idle"
        lead = html.paragraph(f"{self.strategy}: {words}", strong=True)
        return html.block([lead, html.lanes(rows, self.total or 1.0, KINDS)])

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "schedule": self.schedule,
            "ranks": self.ranks,
            "micro_batches": self.micro_batches,
            "origin": self.origin,
            "total": self.total,
            "idle": self.idle,
            "pieces": [piece.to_json() for piece in self.pieces],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Timeline:
        names = ("strategy", "schedule", "ranks", "micro_batches", "origin")
        pieces = tuple(Piece(**piece) for piece in value["pieces"])
        return cls(pieces=pieces, **{name: value[name] for name in names})


def with_idle(pieces: Iterable[Piece], ranks: int) -> tuple[Piece, ...]:
    """Fill the gaps of each rank with idle pieces, up to the end of the last rank."""
    given = sorted(pieces, key=lambda piece: (piece.rank, piece.start, piece.end))
    total = max((piece.end for piece in given), default=0.0)
    return tuple(piece for rank in range(ranks) for piece in _filled(rank, given, total))


def _filled(rank: int, pieces: list[Piece], total: float) -> Iterator[Piece]:
    done = 0.0
    for piece in pieces:
        if piece.rank != rank:
            continue
        if piece.kind != SEND:
            if piece.start > done:
                yield Piece(rank=rank, kind=IDLE, start=done, end=piece.start)
            done = max(done, piece.end)
        yield piece
    if total > done:
        yield Piece(rank=rank, kind=IDLE, start=done, end=total)
