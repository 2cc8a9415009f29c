"""What counts as equal, on made-up traces."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.verify.bounds import reduction_error
from meshwright.verify.evidence import Evidence, Reference
from meshwright.verify.verdict import Verdict, judge, without_verdict

START = torch.zeros(1000, dtype=torch.float64)
ONES = torch.ones(1000, dtype=torch.float64)


def trace(step: torch.Tensor = ONES, loss: float = 1.0, norm: float = 1.0, **rest: Any) -> Evidence:
    states = {"start": {"w": START}, "first": {"w": START + step}, "last": {"w": START + step}}
    return Evidence(losses=[loss], norms=[norm], **{**states, **rest})


def reference(precision: str = "fp32", *, rounding: float = 0.0, **rest: Any) -> Reference:
    moved = trace(ONES + rounding, **rest)
    return Reference(words="plain", precision=precision, exact=trace(**rest), disturbed=[moved])


def verdict_on(found: Evidence, precision: str = "fp32", *, rounding: float = 0.0) -> Verdict:
    return judge("ddp", found, reference(precision, rounding=rounding))


def of_gradient(gradient: torch.Tensor, found: torch.Tensor | None = None, step: torch.Tensor = ONES) -> Verdict:
    """Where the reference has a gradient and a strategy another."""
    known = {"gradients": {"w": gradient}, "smallest": {"w": gradient.abs()}}
    own = {} if found is None else {"w": found}
    return judge("ddp", trace(step, gradients=own), reference("float64", **known))


def test_equal() -> None:
    verdict = verdict_on(trace())
    assert verdict.equal and verdict.status == "equal" and verdict.first_difference is None
    assert verdict.param_max_abs == verdict.loss_max_rel == 0.0


@pytest.mark.parametrize(("precision", "off"), [("fp32", 1e-5), ("float64", 1e-13)])
def test_one_element_is_enough(precision: str, off: float) -> None:
    step = torch.ones(1000, dtype=torch.float64)
    step[17] += off
    verdict = verdict_on(trace(step), precision)
    assert verdict.status == "differs"
    assert verdict.first_difference.startswith("w: differs by")


def test_what_rounding_was_seen_to_do_is_allowed() -> None:
    assert verdict_on(trace(ONES + 1e-5), rounding=1e-6).equal
    assert not verdict_on(trace(ONES + 1e-4), rounding=1e-6).equal


@pytest.mark.parametrize(("loss", "norm", "named"), [(1.001, 1.0, "loss at step 1"), (1.0, 2.0, "grad_norm at step 1")])
@pytest.mark.parametrize("precision", ["float64", "fp32", "bf16"])
def test_numbers(loss: float, norm: float, named: str, precision: str) -> None:
    loss = 1 + 20 * (loss - 1) if precision == "bf16" else loss
    verdict = verdict_on(trace(ONES, loss, norm), precision)
    assert not verdict.equal
    assert named in verdict.first_difference


def test_initial_values_are_the_builders_own_to_the_bit() -> None:
    verdict = verdict_on(trace(start={"w": START + 1e-15}), "float64")
    assert "w: differs by 1e-15 at the start" in verdict.first_difference


def test_outputs_of_the_same_micro_batches_are_compared() -> None:
    plain = reference(outputs=[[ONES], [2 * ONES]])
    assert judge("single", trace(outputs=[[ONES], [2 * ONES]]), plain).equal
    assert "output 1" in judge("single", trace(outputs=[[ONES], [3 * ONES]]), plain).first_difference
    assert "3 tensors" in judge("single", trace(outputs=[[ONES, ONES], [ONES]]), plain).first_difference
    assert judge("single,mb=2", trace(outputs=[[ONES], [ONES], [ONES]]), plain).equal  # of other micro-batches


def test_a_gradient_is_compared_before_the_optimizer() -> None:
    assert of_gradient(ONES, ONES).equal
    assert "it is 2 times the right one" in of_gradient(ONES, 2 * ONES).first_difference
    assert "gradient of w: there is none" in of_gradient(ONES).first_difference


def test_a_gradient_that_should_not_be_is_named() -> None:
    """An optimizer decays what has a gradient of zeros, and passes over what has none."""
    decayed = judge("ddp", trace(0.9 * ONES, gradients={"w": 0 * ONES}), reference("float64", gradients={}))
    assert "gradient of w: there is zeros, where plain PyTorch has none" in decayed.first_difference
    assert judge("ddp", trace(gradients={"w": 0 * ONES}), reference("float64", gradients={})).equal


def test_a_step_made_of_noise_may_go_anywhere_and_no_other() -> None:
    """Adam makes a full step of a gradient that is zero but for rounding."""
    gradient, step = torch.ones(1000, dtype=torch.float64), torch.ones(1000, dtype=torch.float64)
    gradient[17], step[17] = 1e-17, -1
    assert of_gradient(gradient, gradient, step).equal
    step[18] = -1
    assert not of_gradient(gradient, gradient, step).equal


def test_a_copy_that_differs_is_told() -> None:
    verdict = verdict_on(trace(copies={1: "w: rank 1 holds another copy than rank 0 after step 1"}))
    assert verdict.status == "differs" and "rank 1 holds another copy" in verdict.first_difference


def test_a_few_wrong_signs_are_allowed_in_bf16() -> None:
    step = torch.ones(1000, dtype=torch.float64)
    step[:50] = -1
    assert verdict_on(trace(step), "bf16").equal
    step[:250] = -1
    assert not verdict_on(trace(step), "bf16").equal


def test_no_update_differs_in_bf16() -> None:
    assert not verdict_on(trace(0 * ONES), "bf16").equal


def test_missing_and_misshapen() -> None:
    states = {"first": {}, "last": {}}
    assert "w: is missing" in verdict_on(trace(**states)).first_difference
    other = {"w": torch.ones(3)}
    assert "w: has shape (3,)" in verdict_on(trace(first=other, last=other)).first_difference


def test_not_a_number_differs_and_is_null_in_json() -> None:
    verdict = verdict_on(trace(torch.full((1000,), float("nan")), float("nan"), float("inf")))
    assert not verdict.equal
    document = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert document["loss_max_rel"] is None and document["grad_norm_max_rel"] is None


def test_a_refusal_is_a_row() -> None:
    row = without_verdict("tp=2", "refused", "There is no head to divide.").to_json()
    assert row["status"] == "refused" and not row["equal"] and row["loss_max_rel"] is None
    assert row["first_difference"] == "There is no head to divide."


def test_a_sum_in_bf16_is_off_by_its_bound_and_not_by_much_less() -> None:
    """Gradients of n ranks that are rounded and added up one after the other, as a ring does."""
    for ranks in (2, 8, 64):
        own = torch.randn(ranks, 20_000, generator=torch.Generator().manual_seed(ranks))
        summed = own[0].bfloat16()
        for other in own[1:]:
            summed = summed + other.bfloat16()
        exact, found = own.double().sum(0), summed.double()
        bound = reduction_error(replace(reference("bf16"), reduced_over=ranks))
        assert bound / 8 < float((found - exact).norm() / exact.norm()) < bound
        assert abs(float(found.norm() / exact.norm()) - 1) < bound
        assert float(((found > 0) != (exact > 0)).double().mean()) < bound


def test_only_a_sum_in_bf16_widens_bounds() -> None:
    plain, rounded = reference("bf16"), replace(reference("bf16"), reduced_over=64)
    assert reduction_error(plain) == 0.0
    off = trace(norm=1 + 2.0**-5 + 2.0**-6)
    assert not judge("ddp", off, plain).equal
    assert judge("ddp", off, rounded).equal
    assert not judge("ddp", trace(norm=1.1), rounded).equal
    half_wrong = torch.where(torch.arange(1000) % 4 == 0, -ONES, ONES)  # a rank that trains on half of the batch
    assert not judge("ddp", trace(half_wrong), rounded).equal
