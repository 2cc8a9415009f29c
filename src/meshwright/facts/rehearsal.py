"""A rehearsal: real steps of one rank in a fake world, measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, OUT_OF_MEMORY, REFUSED, FAILED, KILLED, TIMEOUT = (
    *("ok", "out of memory", "refused"),
    *("failed", "killed", "timeout"),
)
BUILD, FORWARD, BACKWARD, UPDATE = "build", "forward", "backward", "update"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where in a step something happened."""

    phase: str = BUILD
    module: str = ""
    """Empty between modules, or if it is not known."""

    def __str__(self) -> str:
        return f"{self.phase} of {self.module}" if self.module else self.phase


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """How a rehearsal ended, and what it measured."""

    status: str = OK
    reason: str = ""
    """Empty if it went well."""
    device: str = ""
    """Name of the device it ran on."""
    peak: int = 0
    """Bytes allocated at the peak; if memory ran out, at that moment."""
    reserved: int | None = None
    """Bytes that the allocator held; None on a CPU, where storages are counted."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by cause at the peak."""
    peak_at: Moment = field(default_factory=Moment)
    wanted: int = 0
    """Bytes of the request that could not be met, if memory ran out."""
    seconds: float | None = None
    """Median time of a step's computation, without communication."""
    quickest: float | None = None
    """The same of the quickest timed steps: what else runs on the host makes steps longer, never shorter."""
    retries: int = 0
    """How often the allocator returned memory to the device before it could meet a request."""
    notes: tuple[str, ...] = ()
    took: float = 0.0
    """Seconds of the whole rehearsal, with the start of its process."""

    @property
    def ran(self) -> bool:
        return self.status == OK

    @property
    def held(self) -> int:
        """Bytes that a device must have for it: what was reserved or, where storages are counted, allocated."""
        return self.peak if self.reserved is None else self.reserved

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Rehearsal:
        given = {**value, "peak_at": Moment(**value["peak_at"]), "notes": tuple(value["notes"])}
        return cls(**given)
