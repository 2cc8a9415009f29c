"""From what failed ranks left behind to one error: the first failure, in its own words."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright import errors
from meshwright.launch.attempt import Attempt
from meshwright.launch.preemption import STOPPED

_STOPPED_BY_US = (-signal.SIGTERM, STOPPED)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What an attempt failed of."""

    rank: int
    message: str
    traceback: str = ""
    signal: str | None = None
    """The signal that ended the rank, if one did."""
    exit_code: int | None = None
    """What the rank ended with, if it did so without a word."""
    kind: type[errors.BadInput] | None = None
    """The user's mistake, if it was one."""

    @property
    def mendable(self) -> bool:
        """Whether the same again may go better."""
        return self.kind is None

    @property
    def line(self) -> str:
        return self.message.splitlines()[0].rstrip(".") if self.message else ""

    def error(self, restarts: int) -> errors.MeshwrightError:
        """As an error that also says how often ranks were restarted before it."""
        after = f" (after {restarts} restart{'s' * (restarts > 1)})" if restarts else ""
        if self.kind is not None:
            return self.kind(self.message + after)
        return errors.RankFailed(
            self.message + after,
            rank=self.rank,
            traceback=self.traceback,
            signal=self.signal,
            ended_with=self.exit_code,
        )


def first_failure(attempt: Attempt, exit_codes: Mapping[int, int]) -> Failure:
    """The failure that the others follow from. `exit_codes` are those of failed ranks, in the order they were seen."""
    words = attempt.words()
    spoken = {found.rank for found in words}
    # A rank that a signal ended, or that left without a word, is what its peers complain of.
    wordless = [rank for rank, code in exit_codes.items() if rank not in spoken and code not in _STOPPED_BY_US]
    if wordless or not words:
        rank = next(iter(wordless or exit_codes))
        code = exit_codes[rank]
        return Failure(
            rank=rank,
            message=_ending(rank, code),
            traceback=attempt.last_lines(rank),
            signal=signal.Signals(-code).name if code < 0 else None,
            exit_code=code if code >= 0 else None,
        )
    first = words[0]
    kind = getattr(errors, first.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.BadInput):
        return Failure(rank=first.rank, message=first.message, kind=kind)
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
