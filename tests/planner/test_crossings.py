"""Where kinds of strategies overtake each other."""

import pytest

from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.crossings import Stop, kind_of, lead_changes, overtakings


def stop(value: float, **steps: float) -> Stop:
    plans = {
        kind: Plan(strategy=Strategy.parse(kind), forecast=Forecast(memory={}, time={"compute": step}), fits=True)
        for kind, step in steps.items()
    }
    return Stop(value, plans, min(steps, key=lambda kind: steps[kind], default=None))


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("fsdp=8,bf16,mb=2", "fsdp"),
        ("fsdp=8:grad-op", "fsdp:grad-op"),
        ("hsdp=8x8,tp=2", "hsdp+tp"),
        ("tp=2,pp=4:1f1b", "tp+pp"),
        ("single", "single"),
    ],
)
def test_a_kind_is_the_axes_without_their_sizes(strategy: str, kind: str) -> None:
    assert kind_of(Strategy.parse(strategy)) == kind


def test_a_faster_kind_takes_the_lead() -> None:
    (found,) = lead_changes([stop(8, ddp=1.0, fsdp=1.2), stop(16, ddp=1.0, fsdp=0.8), stop(32, ddp=1.0, fsdp=0.7)])
    assert (found.value, found.kind, found.over, found.why) == (16, "fsdp", "ddp", "faster")
    assert found.gain == pytest.approx(0.2)


def test_a_tie_changes_nothing() -> None:
    assert lead_changes([stop(8, ddp=1.0, fsdp=1.01), stop(16, ddp=1.0, fsdp=0.98), stop(32, ddp=1.0, fsdp=1.1)]) == []


def test_a_leader_that_no_longer_fits_is_overtaken() -> None:
    (found,) = lead_changes([stop(8, ddp=1.0, fsdp=2.0), stop(16), stop(32, fsdp=2.0)])
    assert (found.value, found.kind, found.over, found.why, found.gain) == (32, "fsdp", "ddp", "fits", None)


def test_all_pairs_are_followed_if_asked() -> None:
    stops = [stop(8, ddp=1.0, fsdp=2.0, zero1=3.0), stop(16, ddp=1.0, fsdp=3.0, zero1=2.0)]
    assert lead_changes(stops) == []
    (found,) = overtakings(stops)
    assert (found.kind, found.over) == ("zero1", "fsdp")
