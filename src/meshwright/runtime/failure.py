"""From what failed ranks left behind to one error: the first failure, in its own words."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright import errors
from meshwright.runtime.attempt import Attempt


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What an attempt failed of."""

    rank: int
    message: str
    traceback: str = ""
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
        return errors.RankFailed(self.message + after, rank=self.rank, traceback=self.traceback)


def first_failure(attempt: Attempt, exit_codes: Mapping[int, int]) -> Failure:
    """The failure that the others follow from. `exit_codes` are those of failed ranks, in the order they were seen."""
    words = attempt.words()
    # A rank that a signal ended could say nothing, and what its peers say is only that they lost it.
    ended = [rank for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM]
    if ended or not words:
        rank = next(iter(ended or exit_codes))
        return Failure(rank=rank, message=_ending(rank, exit_codes[rank]), traceback=attempt.last_lines(rank))
    first = words[0]
    kind = getattr(errors, first["kind"], None)
    if isinstance(kind, type) and issubclass(kind, errors.BadInput):
        return Failure(rank=first["rank"], message=first["message"], kind=kind)
    message = f"Rank {first['rank']} failed: {first['kind']}: {first['message']}"
    return Failure(rank=first["rank"], message=message, traceback=first["traceback"])


def _ending(rank: int, code: int) -> str:
    if code >= 0:
        return f"Rank {rank} ended with exit code {code} and said nothing."
    name = signal.Signals(-code).name
    advice = "; the machine may have run out of memory" if name == "SIGKILL" else ""
    return f"Rank {rank} was ended by {name}{advice}."
