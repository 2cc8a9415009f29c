"""The tuner against an exhaustive search over the same candidates, with made-up truths: no process, no clock."""

import random
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from statistics import fmean

import pytest

from meshwright.facts.strategy import Strategy
from meshwright.planner.tune import Candidate, Trial, Tuner

GIB = 2.0**30
AXES = ("ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "tp=2,fsdp", "tp=4,fsdp", "tp=8,ddp")
RECOMPUTE = {"none": (1.0, 1.0), "selective": (1.06, 0.55), "full": (1.3, 0.2)}
"""By recompute: how much longer a step takes, and the share of activations that is kept."""
SIZES = (1, 2, 4, 8, 16, 32)
STATES = dict(zip(AXES, (60.0, 40.0, 30.0, 12.0, 18.0, 9.0, 7.0, 11.0), strict=True))
SPEED = dict(zip(AXES, (1.0, 1.01, 1.02, 1.05, 1.03, 1.12, 1.2, 1.35), strict=True))


@cache
def space() -> list[Candidate]:
    found = []
    for axis, (recompute, (slower, kept)), size in product(AXES, RECOMPUTE.items(), SIZES):
        strategy = replace(Strategy.parse(axis).resolve(8), recompute=recompute, micro_batch=size)
        seconds = SPEED[axis] * slower * (1 + 0.4 / size)
        found.append(Candidate(strategy=strategy, seconds=seconds, bytes=(STATES[axis] + 3 * kept * size) * GIB))
    return found


class Truth:
    """What trials find: forecasts with errors, most of which relatives share."""

    def __init__(self, seed: int, limit: float) -> None:
        self._seed, self._limit, self.calls = seed, limit, 0

    def _factor(self, key: str, spread: float) -> float:
        return 1 + random.Random(f"{self._seed} {key}").uniform(-spread, spread)

    def __call__(self, one: Candidate) -> Trial:
        self.calls += 1
        needs = one.bytes * self._factor(f"memory {one.family}", 0.05)
        if needs > self._limit:
            return Trial(candidate=one, fits=False, bytes=needs)
        seconds = one.seconds * 1.2 * self._factor(f"time {one.family}", 0.03) * self._factor(str(one.strategy), 0.005)
        return Trial(candidate=one, fits=True, seconds=seconds, bytes=needs)


@pytest.mark.parametrize("limit", [24, 45, 80, 140])
@pytest.mark.parametrize("seed", range(4))
def test_as_fast_as_an_exhaustive_search_in_a_tenth_of_its_trials(seed: int, limit: float) -> None:
    candidates = space()
    exhaustive = Truth(seed, limit * GIB)
    fastest = min(trial.seconds or inf for trial in map(exhaustive, candidates))
    truth = Truth(seed, limit * GIB)
    best = Tuner(candidates=candidates, limit=limit * GIB, attempt=truth).search()
    assert best is not None and best.seconds is not None
    assert best.fits and (best.bytes or inf) <= limit * GIB
    assert best.seconds <= fastest * 1.02
    assert truth.calls <= exhaustive.calls / 10


def test_a_micro_batch_between_the_sizes_comes_near_to_the_limit() -> None:
    limit = 100.0

    def candidate(size: int) -> Candidate:
        strategy = replace(Strategy.parse("ddp").resolve(2), micro_batch=size)
        return Candidate(strategy=strategy, seconds=1 + 1 / size, bytes=10 + 3.0 * size)

    def attempt(one: Candidate) -> Trial:
        fits = one.bytes <= limit
        return Trial(candidate=one, fits=fits, seconds=one.seconds if fits else None, bytes=one.bytes)

    tuner = Tuner(candidates=[candidate(size) for size in (1, 2, 4, 8, 16, 32, 64)], limit=limit, attempt=attempt)
    best = tuner.search(lambda low, high: [candidate(size) for size in range(low.size + 1, high.size)])
    assert best is not None and best.bytes is not None
    assert 0.95 * limit <= best.bytes <= limit


def test_a_size_above_one_that_ran_out_is_not_tried() -> None:
    tried = []

    def attempt(one: Candidate) -> Trial:
        tried.append(one.size)
        return Trial(candidate=one, fits=one.size < 3, seconds=1 / one.size, bytes=one.bytes)

    strategies = [replace(Strategy.parse("ddp").resolve(2), micro_batch=size) for size in (1, 2, 4, 8)]
    candidates = [Candidate(strategy=one, seconds=1 / (one.micro_batch or 1), bytes=1.0) for one in strategies]
    best = Tuner(candidates=candidates, limit=10.0, attempt=attempt).search()
    assert best is not None and best.candidate.size == 2
    assert tried == [8, 4, 2]


def test_nothing_fits() -> None:
    candidates = space()
    tuner = Tuner(
        candidates=candidates, limit=1.0, attempt=lambda one: Trial(candidate=one, fits=False, bytes=one.bytes)
    )
    assert tuner.search() is None


def test_no_trial_begins_once_the_time_is_over() -> None:
    truth = Truth(0, 80 * GIB)
    tuner = Tuner(candidates=space(), limit=80 * GIB, attempt=truth, is_over=lambda: truth.calls == 2)
    assert tuner.search() is not None and truth.calls == 2
    assert tuner.has_more


def test_strangers_that_need_more_than_one_that_ran_out_are_not_tried() -> None:
    """A forecast that is too low for everything costs few trials, whatever the number of strategies at the limit."""
    limit = 30.0
    at_the_limit = [
        Candidate(strategy=Strategy.parse(axis).resolve(8), seconds=1 + place / 100, bytes=29.9 - place / 10)
        for place, axis in enumerate(AXES)
    ]
    smaller = Candidate(strategy=replace(Strategy.parse("fsdp").resolve(8), micro_batch=1), seconds=1.5, bytes=20.0)

    def attempt(one: Candidate) -> Trial:
        needs = one.bytes * 1.1
        fits = needs <= limit
        return Trial(candidate=one, fits=fits, seconds=one.seconds if fits else None, bytes=min(needs, limit + 0.1))

    tuner = Tuner(candidates=[*at_the_limit, smaller], limit=limit, attempt=attempt)
    best = tuner.search()
    assert best is not None and best.candidate is smaller
    assert len(tuner.trials) == 2


def test_a_disturbed_trial_does_not_end_the_search() -> None:
    """Of three strategies that are forecast alike, the second trial is slowed down by something else on its host."""
    candidates = [
        Candidate(strategy=Strategy.parse(axis).resolve(8), seconds=1 + place / 40, bytes=1.0)
        for place, axis in enumerate(("ddp", "fsdp:grad-op", "fsdp"))
    ]
    seconds = dict(zip((one.strategy for one in candidates), (1.5, 2.4, 1.2), strict=True))

    def attempt(one: Candidate) -> Trial:
        return Trial(candidate=one, fits=True, seconds=seconds[one.strategy], bytes=1.0)

    best = Tuner(candidates=candidates, limit=10.0, attempt=attempt).search()
    assert best is not None and best.seconds == 1.2


def test_one_slow_trial_does_not_rule_out_strangers() -> None:
    """The first trial takes 1.6 times its forecast, because the host is slow or was disturbed: others are tried."""
    candidates = [
        Candidate(strategy=Strategy.parse("fsdp").resolve(8), seconds=0.42, bytes=1.0),
        Candidate(strategy=Strategy.parse("fsdp,ac=full").resolve(8), seconds=0.47, bytes=1.0),
        Candidate(strategy=Strategy.parse("ddp").resolve(8), seconds=0.75, bytes=1.0),
    ]
    seconds = dict(zip((one.strategy for one in candidates), (0.68, 0.51, 0.8), strict=True))
    tried = []

    def attempt(one: Candidate) -> Trial:
        tried.append(str(one.strategy))
        return Trial(candidate=one, fits=True, seconds=seconds[one.strategy], bytes=1.0)

    best = Tuner(candidates=candidates, limit=10.0, attempt=attempt, most=2).search()
    assert best is not None and best.seconds == 0.51
    assert tried == ["fsdp=8", "fsdp=8,ac=full"]


def test_a_trial_that_may_have_been_disturbed_is_repeated() -> None:
    first, second = (
        Candidate(strategy=Strategy.parse(text).resolve(8), seconds=seconds, bytes=1.0)
        for text, seconds in (("ddp", 1.0), ("fsdp", 1.02))
    )
    found = {first.strategy: [1.3, 1.0], second.strategy: [1.02]}

    def attempt(one: Candidate) -> Trial:
        return Trial(candidate=one, fits=True, seconds=found[one.strategy].pop(0), bytes=1.0)

    tuner = Tuner(candidates=[first, second], limit=10.0, attempt=attempt)
    best = tuner.search()
    assert best is not None and best.candidate is first and best.seconds == 1.0
    assert [trial.candidate for trial in tuner.trials] == [first, second, first]
    assert tuner.trials[-1].why.startswith("repeated")


def test_a_strategy_that_runs_out_when_it_is_repeated_is_not_chosen() -> None:
    first, second = (
        Candidate(strategy=Strategy.parse(text).resolve(8), seconds=1.0 + place / 50, bytes=1.0)
        for place, text in enumerate(("ddp", "fsdp"))
    )
    found: dict[Strategy, list[float | None]] = {first.strategy: [1.3, None], second.strategy: [1.02]}

    def attempt(one: Candidate) -> Trial:
        seconds = found[one.strategy].pop(0)
        return Trial(candidate=one, fits=seconds is not None, seconds=seconds, bytes=1.0)

    best = Tuner(candidates=[first, second], limit=10.0, attempt=attempt).search()
    assert best is not None and best.candidate is second


@pytest.mark.parametrize(("noise", "bound"), [(0.05, 0.009), (0.2, 0.022), (0.4, 0.03)])
def test_a_busy_host_costs_little(noise: float, bound: float) -> None:
    """Trials are longer than the truth by an exponential share; the choice is judged by its undisturbed time.

    200 seeds are 0.6, 1.8 and 2.2 % above the fastest in the mean; without repeated trials, it was 1.0, 2.6 and 3.4 %.
    """
    lost = []
    for seed in range(40):
        limit = (24, 45, 80, 140)[seed % 4] * GIB
        truth, host = Truth(seed, limit), random.Random(seed)

        def attempt(one: Candidate, truth: Truth = truth, host: random.Random = host) -> Trial:
            trial = truth(one)
            longer = 1 + host.expovariate(1 / noise)
            return trial if trial.seconds is None else replace(trial, seconds=trial.seconds * longer)

        fastest = min(trial.seconds or inf for trial in map(Truth(seed, limit), space()))
        best = Tuner(candidates=space(), limit=limit, attempt=attempt).search()
        assert best is not None and truth.calls <= len(space()) / 10
        lost.append((truth(best.candidate).seconds or inf) / fastest - 1)
    assert fmean(lost) < bound
