"""Find the first failure among failed ranks, and turn it into one error."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright import errors
from meshwright.launch.attempt import Attempt
from meshwright.launch.preemption import STOPPED

_STOPPED_BY_US = (-signal.SIGTERM, STOPPED)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an attempt failed."""

    rank: int
    message: str
    traceback: str = ""
    signal: str | None = None
    """The signal that ended the rank, if one did."""
    exit_code: int | None = None
    """The exit code of a rank that ended without reporting an error."""
    kind: type[errors.BadInput] | None = None
    """The error class, if it is a mistake of the user, which a restart cannot fix."""
    host: str = ""
    """Where it happened, if the run has several nodes."""
    at: float = field(default_factory=time.time)
    final: bool = False
    """Whether the run cannot go on."""
    details: dict[str, Any] = field(default_factory=dict)
    """What a rank that ran out of memory reports."""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sorts failures of several nodes, the cause first."""
        silent = self.signal is not None or self.exit_code is not None
        return self.kind is None, not silent, self.at

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.__name__ if self.kind else None}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Failure:
        kind = document["kind"]
        return cls(**{**document, "kind": getattr(errors, kind) if kind else None})

    @property
    def line(self) -> str:
        first = self.message.splitlines()[0].rstrip(".") if self.message else ""
        return f"{self.host}: {first}" if self.host and self.host not in first else first

    def error(self, restarts: int) -> errors.MeshwrightError:
        """The error to raise, which also says how often ranks were restarted."""
        after = f" (after {restarts} restart{'s' * (restarts > 1)})" if restarts else ""
        where = f"On {self.host}: " if self.host and self.host not in self.message else ""
        if self.kind is errors.OutOfMemory:
            return errors.OutOfMemory(where + self.message, self.details)
        if self.kind is not None:
            return self.kind(self.message + after)
        return errors.RankFailed(
            where + self.message + after,
            rank=self.rank,
            traceback=self.traceback,
            signal=self.signal,
            ended_with=self.exit_code,
        )


def first_failure(attempt: Attempt, exit_codes: Mapping[int, int], *, oom_kills: int = 0) -> Failure:
    """The failure that caused the others. `exit_codes` are those of failed ranks, in the order they were seen.

    `oom_kills`: processes that the kernel has killed for lack of memory during the attempt.
    """
    reported = attempt.errors()
    known = {error.rank for error in reported}
    # A rank that was killed, or ended without reporting an error, is what makes its peers fail.
    silent = [rank for rank, code in exit_codes.items() if rank not in known and code not in _STOPPED_BY_US]
    if silent or not reported:
        rank = next(iter(silent or exit_codes))
        code = exit_codes[rank]
        if code == -signal.SIGKILL and oom_kills:
            message = f"Rank {rank} was ended by SIGKILL when the kernel's out-of-memory killer was at work."
            return Failure(rank=rank, message=message, kind=errors.OutOfMemory)
        return Failure(
            rank=rank,
            message=_ending(rank, code),
            traceback=attempt.last_lines(rank),
            signal=signal.Signals(-code).name if code < 0 else None,
            exit_code=code if code >= 0 else None,
        )
    first = reported[0]
    kind = getattr(errors, first.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.BadInput):
        return Failure(rank=first.rank, message=first.message, kind=kind, details=first.details)
    message = f"Rank {first.rank} failed: {first.kind}: {first.message}"
    return Failure(rank=first.rank, message=message, traceback=first.traceback)


def _ending(rank: int, code: int) -> str:
    if code == 0:
        return f"Rank {rank} ended with exit code 0 before its work was done, and said nothing."
    if code > 0:
        return f"Rank {rank} ended with exit code {code} and said nothing."
    name = signal.Signals(-code).name
    advice = "; the machine may have run out of memory" if name == "SIGKILL" else ""
    return f"Rank {rank} was ended by {name}{advice}."
