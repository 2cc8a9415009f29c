"""Choose the fastest strategy that fits by as few trials as possible. Pure: the caller makes the trials.

A forecast orders the candidates. Each trial corrects the forecasts of its relatives: those that differ only in their
micro-batch by its own error, the others by what an undisturbed trial would show. A busy host makes steps longer, never
shorter, so that is less than any trial's error, the further below the more the trials disagree. The search ends when no
candidate is expected to be faster than the best one, even if its forecast is wrong by as much as forecasts of relatives
usually are. Last, trials that may have been disturbed are repeated if they could be the fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from statistics import median

from meshwright.facts.strategy import Strategy

DOUBT_OF_STRANGERS, DOUBT_OF_RELATIVES = 0.08, 0.015
"""How much faster than expected a candidate may be, if none of its relatives has been tried, or one has."""
ROOM_FOR_DOUBT = 1.08
"""A candidate that is expected to need up to this many times the limit is tried, as long as none ran out of memory."""
LESS_THAN_TOO_MUCH = 0.97
"""If a candidate runs out of memory, others are tried if they are expected to need less than this share of it."""
SHARE_OF_TRIALS = 0.1
LEAST_TRIALS = 6
"""Trials are at most this share of the candidates, and never fewer than these."""
REPEATS = 3
"""Trials beyond the least number that are kept for repeating others."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its forecast."""

    strategy: Strategy
    seconds: float
    """Of a step."""
    bytes: float
    """That the fullest rank needs."""

    @cached_property
    def family(self) -> Strategy:
        return replace(self.strategy, micro_batch=None)

    @property
    def size(self) -> int:
        return self.strategy.micro_batch or 1 << 60  # the whole part of a rank


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a rehearsal of a candidate found."""

    candidate: Candidate
    fits: bool
    seconds: float | None = None
    bytes: float | None = None
    """What it needs; if memory ran out, at least this. None if it could not be run at all."""
    why: str = ""
    """Why it was tried."""


@dataclass
class Tuner:
    """The state of a search."""

    candidates: Sequence[Candidate]
    limit: float
    attempt: Callable[[Candidate], Trial]
    most: int | None = None
    """Trials at most. None: a share of the candidates."""
    is_over: Callable[[], bool] = lambda: False
    """Whether to begin no more trials."""
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        unfit = {trial.candidate.strategy for trial in self.trials if not trial.fits}  # perhaps only when repeated
        ran = [trial for trial in self._timed() if trial.candidate.strategy not in unfit]
        return min(ran, key=lambda trial: trial.seconds or inf, default=None)

    @property
    def has_more(self) -> bool:
        """Whether the search ended before its time."""
        return self._next(self.candidates) is not None

    def search(self, between: Callable[[Candidate, Candidate], Iterable[Candidate]] | None = None) -> Trial | None:
        """Try candidates until none is expected to be faster, and then sizes between the best one and the next larger.

        `between` gives candidates between two of one family, of which the second does not fit.
        """
        self._try_all(self.candidates)
        if between is not None and self.best is not None:
            self._fill(between)
        self._repeat()
        return self.best

    @property
    def _budget(self) -> int:
        return self.most or max(LEAST_TRIALS, round(SHARE_OF_TRIALS * len(self.candidates)))

    def _try_all(self, candidates: Sequence[Candidate]) -> None:
        """Try candidates, the most promising first, until none is expected to be faster than the best trial."""
        most = max(min(self._budget, LEAST_TRIALS), self._budget - REPEATS)
        while len(self.trials) < most and not self.is_over() and (chosen := self._next(candidates)) is not None:
            self._try(chosen)

    def _repeat(self) -> None:
        """Repeat trials that may have been disturbed, as long as one could be faster than the best."""
        most = min(self._budget, len(self.trials) + REPEATS)
        while len(self.trials) < most and not self.is_over() and (chosen := self._disturbed()) is not None:
            self._try(chosen)

    def _disturbed(self) -> Candidate | None:
        """The candidate that was tried once and would be fastest if its trial had gone as well as the best ones did."""
        least = min(map(_ratio, self._timed()), default=1.0)
        tried = Counter(trial.candidate.strategy for trial in self.trials)
        once = [trial for trial in self._timed() if trial.fits and tried[trial.candidate.strategy] == 1]
        slow = [one.candidate for one in once if _ratio(one) * (1 - DOUBT_OF_RELATIVES) > least]
        chosen = min(slow, key=lambda one: one.seconds, default=None)
        if chosen is None or self.best is None or chosen.seconds * least >= (self.best.seconds or inf):
            return None
        return chosen

    def _fill(self, between: Callable[[Candidate, Candidate], Iterable[Candidate]]) -> None:
        """Bisect the sizes between the best one and the smallest of its family that does not fit."""
        best = self.best
        assert best is not None
        larger = [one for one in self.candidates if one.family == best.candidate.family]
        larger = [one for one in larger if one.size > best.candidate.size]
        if not larger:
            return
        self._try_all(list(between(best.candidate, min(larger, key=lambda one: one.size))))

    def _next(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The candidate that is expected to be fastest, if it may be faster than the best trial."""
        tried = {trial.candidate.strategy for trial in self.trials}
        open_ = [one for one in candidates if one.strategy not in tried and self._may_fit(one)]
        chosen = min(open_, key=lambda one: (self._hoped(one), one.bytes), default=None)
        if chosen is None or (self.best is not None and self._hoped(chosen) >= (self.best.seconds or inf)):
            return None
        return chosen

    def _try(self, chosen: Candidate) -> None:
        trial = self.attempt(chosen)
        self.trials.append(replace(trial, why=trial.why or self._reason(chosen)))

    def _reason(self, chosen: Candidate) -> str:
        if not self.trials:
            return "fastest by its forecast"
        if any(trial.candidate.strategy == chosen.strategy for trial in self.trials):
            return "repeated, because its first trial may have been disturbed"
        if any(trial.candidate.family == chosen.family and not trial.fits for trial in self.trials):
            return "the larger micro-batch did not fit"
        return "may be faster, as far as the forecast can tell"

    def _hoped(self, one: Candidate) -> float:
        """Seconds that a candidate takes if it is as much faster than expected as is usual."""
        relatives = [trial for trial in self._timed() if trial.candidate.family == one.family]
        if relatives:
            near = min(relatives, key=lambda trial: (abs(trial.candidate.seconds - one.seconds), _ratio(trial)))
            return one.seconds * _ratio(near) * (1 - DOUBT_OF_RELATIVES)
        return one.seconds * self._undisturbed() * (1 - DOUBT_OF_STRANGERS)

    def _undisturbed(self) -> float:
        """Seconds for each one that was forecast, if nothing else keeps the host busy.

        The lower end of a distribution lies about as far below its least sample as that one below the next (Robson and
        Whitlock, Biometrika 51, 1964). But forecasts are not taken to be too long unless a trial has shown it: a single
        slow trial does not tell a slow host from a disturbed one.
        """
        least, second = sorted([*map(_ratio, self._timed()), inf, inf])[:2]
        return min(1.0, least) if second == inf else max(2 * least - second, min(1.0, least))

    def _timed(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.seconds is not None]

    def _may_fit(self, one: Candidate) -> bool:
        relatives = [trial for trial in self.trials if trial.candidate.family == one.family]
        if any(not trial.fits and trial.candidate.size <= one.size for trial in relatives):
            return False
        needs = [_needs(trial) for trial in relatives if trial.bytes]
        if needs:
            return one.bytes * needs[-1] <= self.limit * ROOM_FOR_DOUBT
        return one.bytes <= self._largest()

    def _largest(self) -> float:
        """The forecast up to which a candidate without relatives may fit.

        It goes down when a smaller one runs out of memory, as in a bisection, but never below one that fitted.
        """
        fitted = [trial for trial in self.trials if trial.bytes and trial.fits]
        ran_out = [trial.candidate.bytes for trial in self.trials if trial.bytes and not trial.fits]
        largest = self.limit * ROOM_FOR_DOUBT / median([_needs(trial) for trial in fitted] or [1.0])
        below = min(ran_out, default=inf) * LESS_THAN_TOO_MUCH
        return min(largest, max([below, *(trial.candidate.bytes for trial in fitted)]))


def _needs(trial: Trial) -> float:
    """Bytes for each one that was forecast; at least these if memory ran out."""
    return (trial.bytes or 0.0) / trial.candidate.bytes if trial.candidate.bytes else 1.0


def _ratio(trial: Trial) -> float:
    return (trial.seconds or 0.0) / trial.candidate.seconds
