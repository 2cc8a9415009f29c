import json
import pickle

from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy

PLAN = Plan(
    strategy=Strategy.parse("fsdp=4,tp=2,bf16"),
    forecast=Forecast(memory={"parameters": 10}, time={"compute": 0.1}),
    fits=True,
    why=("The least exposed communication.", "Fits with 12 GiB to spare."),
)


def test_round_trips() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN


def test_the_strategy_is_readable_in_json() -> None:
    assert PLAN.to_json()["strategy"] == "fsdp=4,tp=2,bf16"


def test_every_field_counts() -> None:
    value = PLAN.to_json()
    changed = [value | {"fits": False}, value | {"why": []}, value | {"strategy": "ddp"}]
    assert all(Plan.from_json(other) != PLAN for other in changed)
