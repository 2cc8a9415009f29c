"""Which plan leads is settled by traces, not by the clock."""

from dataclasses import replace

import pytest

from meshwright.api import finalists
from meshwright.api.finalists import TRIES, settle
from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy


def plan(text: str, seconds: float) -> Plan:
    return Plan(
        strategy=Strategy.parse(text), forecast=Forecast(memory={"parameters": 1}, time={"compute": seconds}), fits=True
    )


class Tracer:
    """Finds the named strategies too large, and counts."""

    def __init__(self, *too_large: str) -> None:
        self.too_large, self.traced = too_large, list[str]()

    def __call__(self, plan: Plan) -> Plan:
        self.traced.append(str(plan.strategy))
        fits = str(plan.strategy) not in self.too_large
        return replace(plan, grade="trace", fits=fits, why=() if fits else ("needs more",))


def by_time(plans: list[Plan]) -> list[Plan]:
    return sorted(plans, key=lambda plan: plan.forecast.step)


def test_a_smaller_micro_batch_of_the_same_kind_may_lead() -> None:
    plans = [plan("ddp=8,mb=8", 1.0), plan("ddp=8,mb=4", 1.1), plan("ddp=8,mb=16", 1.2), plan("fsdp=8,mb=8", 1.3)]
    found = settle(plans, rank=by_time, trace=Tracer("ddp=8,mb=8"), count=1)
    assert [str(one.strategy) for one in found.plans] == ["ddp=8,mb=4", "fsdp=8,mb=8"]
    assert found.plans[0].grade == "trace"
    assert [(str(one.strategy), one.why) for one in found.unfit] == [
        ("ddp=8,mb=8", ("needs more",)),
        ("ddp=8,mb=16", ("does not fit with mb=8 either",)),
    ]


def test_the_leader_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan(f"ddp=8,mb={2**n}", 5.0 - n) for n in range(5)]
    trace = Tracer("ddp=8,mb=16", "ddp=8,mb=8")
    monkeypatch.setattr(finalists, "PATIENCE", -1.0)
    found = settle(plans, rank=by_time, trace=trace, count=3)
    assert str(found.plans[0].strategy) == "ddp=8,mb=4"
    assert trace.traced == ["ddp=8,mb=16", "ddp=8,mb=8", "ddp=8,mb=4"]
    assert found.note == ""


def test_a_traced_plan_that_no_longer_leads_gives_way_to_one_that_is_traced_as_well() -> None:
    def rank(plans: list[Plan]) -> list[Plan]:
        return sorted(plans, key=lambda one: (one.grade == "trace" and one.strategy.data == "ddp", one.forecast.step))

    trace = Tracer()
    found = settle([plan("ddp=8", 1.0), plan("fsdp=8", 2.0)], rank=rank, trace=trace, count=1)
    assert [(one.strategy.data, one.grade) for one in found.plans] == [("fsdp", "trace"), ("ddp", "trace")]


def test_finalists_are_traced_and_keep_their_order() -> None:
    plans = [plan(text, 1.0 + n) for n, text in enumerate(("ddp=8", "zero1=8", "zero2=8", "fsdp=8"))]
    found = settle(plans, rank=by_time, trace=Tracer("zero1=8"), count=3)
    assert [(one.strategy.data, one.grade) for one in found.plans] == [
        ("ddp", "trace"),
        ("zero2", "trace"),
        ("fsdp", "trace"),
    ]


def test_a_leader_that_was_not_traced_is_named() -> None:
    plans = [plan(f"pp={n + 2}:1f1b", 1.0 + n) for n in range(TRIES + 2)]
    trace = Tracer(*(f"pp={n + 2}:1f1b" for n in range(TRIES)))
    found = settle(plans, rank=by_time, trace=trace, count=0)
    assert len(trace.traced) == TRIES
    assert found.note.startswith(f"{found.plans[0].strategy} leads by its closed-form forecast")
    assert found.plans[0].grade == "account"


class Rough(Tracer):
    """Leaves open whether the named strategies fit, until they are decided."""

    def __call__(self, plan: Plan) -> Plan:
        is_open = str(plan.strategy) in self.too_large
        self.traced.append(str(plan.strategy))
        memory = {"parameters": 100 if is_open else 1}
        return replace(plan, grade="trace", is_open=is_open, forecast=replace(plan.forecast, memory=memory))


def test_an_open_plan_that_leads_is_decided() -> None:
    plans = [plan("ddp=8", 1.0), plan("fsdp=8", 2.0)]
    for fits, names in ((True, ["ddp", "fsdp"]), (False, ["fsdp"])):
        decided: list[str] = []

        def decide(one: Plan, fits: bool = fits, decided: list[str] = decided) -> Plan:
            decided.append(str(one.strategy))
            return replace(one, is_open=False, fits=fits, why=() if fits else ("needs more",))

        found = settle(plans, rank=by_time, trace=Rough("ddp=8"), decide=decide, count=1)
        assert [one.strategy.data for one in found.plans] == names and decided == ["ddp=8"]


def test_an_open_plan_that_does_not_lead_is_not_traced_again() -> None:
    def roomy(plans: list[Plan]) -> list[Plan]:
        return sorted(plans, key=lambda one: (one.forecast.peak > 50, one.forecast.step))

    def decide(one: Plan) -> Plan:
        raise AssertionError(one)

    plans, trace = [plan("ddp=8", 1.0), plan("fsdp=8", 2.0)], Rough("ddp=8")
    found = settle(plans, rank=roomy, trace=trace, decide=decide, count=1, room=200)
    assert [one.strategy.data for one in found.plans] == ["fsdp", "ddp"]
    found = settle(plans, rank=roomy, trace=trace, decide=decide, count=1, room=70)
    assert [one.strategy.data for one in found.plans] == ["fsdp"]
    assert [one.why for one in found.unfit] == [(finalists.OPEN,)]


def test_nothing_to_trace() -> None:
    assert settle([], rank=by_time, trace=Tracer(), count=3).plans == []


def test_what_a_trace_shows_holds_on_other_data_axes() -> None:
    class Heavy(Tracer):
        def __call__(self, plan: Plan) -> Plan:
            checked = super().__call__(plan)
            memory = {"parameters": 1, "activations": 100 * (plan.strategy.micro_batch or 0)}
            fits = sum(memory.values()) <= 500
            return replace(checked, forecast=replace(plan.forecast, memory=memory), fits=fits, why=())

    plans = [plan(f"{data}=8,mb={size}", 9 - size + n) for n, data in enumerate(("ddp", "fsdp")) for size in (8, 4)]
    plans.append(plan("ddp=8,ac=full,mb=8", 9.0))
    trace = Heavy()
    found = settle(plans, rank=by_time, trace=trace, count=1, room=500)
    assert trace.traced == ["ddp=8,mb=8", "ddp=8,mb=4"]
    assert [str(one.strategy) for one in found.plans] == ["ddp=8,mb=4", "fsdp=8,mb=4", "ddp=8,ac=full,mb=8"]
    assert [str(one.strategy) for one in found.unfit] == ["ddp=8,mb=8", "fsdp=8,mb=8"]
