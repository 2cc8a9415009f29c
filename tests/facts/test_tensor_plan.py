"""A tensor plan says which sizes divide it, and says so in one sentence where they do not."""

import json

import pytest

from meshwright.facts.tensor_plan import TensorPlan, TensorRow


def attention(heads: int, key_values: int) -> tuple[TensorRow, ...]:
    """Grouped-query attention of heads 8 wide."""
    return (
        TensorRow(module="q", role="column", parts=heads, what="heads", feeds="o"),
        TensorRow(module="k", role="column", parts=key_values, what="heads", feeds="o"),
        TensorRow(module="v", role="column", parts=key_values, what="heads", feeds="o"),
        TensorRow(module="o", role="row", parts=8 * heads),
    )


TOKEN = TensorRow(module="token", role="vocabulary", parts=50257, what="vocabulary")
NOTHING = TensorPlan(rows=(TensorRow(module="head", role="whole", reason="no partner"),))


def roles(plan: TensorPlan) -> dict[str, str]:
    return {row.module: row.role for row in plan.rows}


def test_json_round_trip() -> None:
    plan = TensorPlan(rows=(*attention(8, 2), TOKEN), sequence=True)
    assert TensorPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(("ranks", "key"), [(1, "column"), (2, "column"), (4, "whole"), (8, "whole")])
def test_keys_are_whole_where_their_heads_do_not_divide(ranks: int, key: str) -> None:
    plan = TensorPlan(rows=attention(8, 2))
    assert plan.refuse(ranks) is None
    assert roles(plan.for_ranks(ranks)) == {"q": "column", "k": key, "v": key, "o": "row"}


def test_why_keys_are_whole() -> None:
    rows = {row.module: row for row in TensorPlan(rows=attention(4, 1)).for_ranks(2).rows}
    assert rows["k"].reason == "on every rank: 1 key-value head for 2 ranks"


def test_query_heads_that_do_not_divide_are_refused() -> None:
    assert TensorPlan(rows=attention(12, 12)).refuse(8) == (
        "tp=8 was asked, but q has 12 heads, which 8 ranks cannot divide; tp can be 2, 3, 4, 6 or 12."
    )


def test_a_width_that_does_not_divide_is_refused() -> None:
    up = TensorRow(module="up", role="column", parts=100, feeds="down")
    plan = TensorPlan(rows=(*attention(8, 8), up, TensorRow(module="down", role="row", parts=100)))
    assert plan.refuse(8) == "tp=8 was asked, but up has a width of 100, which 8 ranks cannot divide; tp can be 2 or 4."


def test_no_size_divides() -> None:
    plan = TensorPlan(rows=(TensorRow(module="up", role="column", parts=7), TensorRow(module="b", role="row", parts=8)))
    assert str(plan.refuse(2)).endswith("no tp divides all of its layers; use op=N instead.")


def test_a_vocabulary_that_does_not_divide_is_whole() -> None:
    plan = TensorPlan(rows=(*attention(4, 4), TOKEN))
    assert plan.refuse(2) is None
    assert roles(plan.for_ranks(2))["token"] == "whole"


def test_nothing_but_a_vocabulary_that_does_not_divide() -> None:
    assert TensorPlan(rows=(TOKEN,)).refuse(2) == (
        "tp=2 was asked, but token has a vocabulary of 50257, and nothing else could be divided; use op=2."
    )


def test_nothing_to_divide_points_elsewhere() -> None:
    reason = NOTHING.refuse(2)
    assert reason is not None and "Job(tensor_plan=...)" in reason and "op=2" in reason


def test_mapping_and_table() -> None:
    plan = TensorPlan(rows=attention(4, 4)[2:])
    assert plan.as_mapping() == {"v": "column", "o": "row"}
    found = "found in a step on fake tensors"
    assert plan.table() == [("v", "column", "4 heads", found), ("o", "row", "width 32", found)]


def test_layers_that_repeat_are_one_pattern() -> None:
    names = ("blocks.0.up", "blocks.1.up", "blocks.0.inner.up", "head")
    plan = TensorPlan(rows=tuple(TensorRow(module=name, role="column", parts=4) for name in names[1:]))
    assert set(plan.as_mapping()) == set(names[1:])  # one of each: nothing repeats
    plan = TensorPlan(rows=tuple(TensorRow(module=name, role="column", parts=4) for name in (*names[:2], "head")))
    assert plan.as_mapping() == {"blocks.*.up": "column", "head": "column"}
    plan = TensorPlan(rows=tuple(TensorRow(module=name, role="column", parts=4) for name in names))
    assert set(plan.as_mapping()) == set(names)  # the pattern would also mean blocks.0.inner.up
