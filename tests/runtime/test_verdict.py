"""What counts as equal, on made-up traces."""

import json

import pytest
import torch

from meshwright.facts.strategy import Strategy
from meshwright.runtime.verdict import Trace, judge

FP32, BF16 = Strategy.parse("single"), Strategy.parse("single,bf16")
START = torch.zeros(1000)


def trace(step: torch.Tensor, loss: float = 1.0, norm: float = 1.0) -> Trace:
    return Trace(losses=[loss], norms=[norm], start={"w": START}, first={"w": START + step}, last={"w": START + step})


def verdict_on(found: Trace, reference: Strategy = FP32, *, rounding: float = 0.0):
    exact, moved = trace(torch.ones(1000)), trace(torch.ones(1000) + rounding)
    return judge("ddp", reference, found, exact, [moved])


def test_equal() -> None:
    verdict = verdict_on(trace(torch.ones(1000)))
    assert verdict.equal and verdict.first_difference is None
    assert verdict.param_max_abs == verdict.loss_max_rel == 0.0


def test_one_element_is_enough_in_fp32() -> None:
    step = torch.ones(1000)
    step[17] += 1e-5
    verdict = verdict_on(trace(step))
    assert not verdict.equal
    assert verdict.first_difference.startswith("w: differs by")


def test_what_rounding_was_seen_to_do_is_allowed() -> None:
    assert verdict_on(trace(torch.ones(1000) + 1e-5), rounding=1e-6).equal
    assert not verdict_on(trace(torch.ones(1000) + 1e-4), rounding=1e-6).equal


@pytest.mark.parametrize(("loss", "norm", "named"), [(1.001, 1.0, "loss at step 1"), (1.0, 2.0, "grad_norm at step 1")])
def test_numbers(loss: float, norm: float, named: str) -> None:
    verdict = verdict_on(trace(torch.ones(1000), loss, norm))
    assert not verdict.equal
    assert named in verdict.first_difference


def test_a_few_wrong_signs_are_allowed_in_bf16() -> None:
    step = torch.ones(1000)
    step[:50] = -1
    assert verdict_on(trace(step), BF16).equal
    step[:250] = -1
    assert not verdict_on(trace(step), BF16).equal


def test_no_update_differs_in_bf16() -> None:
    assert not verdict_on(trace(torch.zeros(1000)), BF16).equal


def test_missing_and_misshapen() -> None:
    nothing = Trace(losses=[1.0], norms=[1.0], start={}, first={}, last={})
    other = Trace(losses=[1.0], norms=[1.0], first={"w": torch.ones(3)}, last={"w": torch.ones(3)})
    assert "w: is missing" in verdict_on(nothing).first_difference
    assert "w: has shape (3,)" in verdict_on(other).first_difference


def test_not_a_number_differs_and_is_null_in_json() -> None:
    verdict = verdict_on(trace(torch.full((1000,), float("nan")), float("nan"), float("inf")))
    assert not verdict.equal
    document = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert document["loss_max_rel"] is None and document["grad_norm_max_rel"] is None
