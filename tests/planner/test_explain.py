"""The first plan says what its context or expert axis gains."""

from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.explain import explain


def plan(text: str, seconds: float) -> Plan:
    forecast = Forecast(memory={"parameters": 1}, time={"compute": seconds})
    return Plan(strategy=Strategy.parse(text), forecast=forecast, fits=True)


def why(*plans: Plan) -> str:
    return " ".join(explain(list(plans[:1]), all_found=plans)[0].why)


def test_the_fastest_without_an_axis() -> None:
    found = why(plan("fsdp=2,cp=4", 1.0), plan("ddp=2,cp=4", 1.1), plan("fsdp=4,tp=2", 1.5), plan("fsdp=8", 2.0))
    assert "Without cp, the fastest is fsdp=4,tp=2, 50% slower: 500 ms more of computing." in found
    assert "Without ep, nothing fits." in why(plan("fsdp=2,ep=4", 1.0))


def test_nothing_is_said_where_nothing_is_gained() -> None:
    assert "Without" not in why(plan("fsdp=2,cp=4", 1.0), plan("fsdp=8", 1.01))
    assert "Without" not in why(plan("fsdp=4,tp=2", 1.0), plan("fsdp=8", 2.0))
    assert "Without" not in " ".join(explain([plan("fsdp=2,cp=4", 1.0)])[0].why)
