"""What loops do to a laid-out model that nobody planned for: right, refused or loud, and never silently wrong."""

from functools import cache

import pytest

import misuse_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow

plainly = cache(misuse_programs.plainly)
REFUSED = [
    ("ddp", "module_replaced", "The module leave was replaced"),
    ("ddp", "gradients_by_autograd", "would update the same parameters by different gradients"),
    ("ddp", "loose_parameter", "that no laid-out model has"),
    ("ddp", "plain_module_beside", "lay out its module with mw.parallelize"),
    ("ddp", "skipped_on_one_rank", "in skipped_on_one_rank), but rank 1 ran the backward pass of its call 8 (line"),
    ("ddp", "skipped_before_backward", "Rank 0 ran the backward pass of its call 7 (line"),
    ("ddp", "wrapped_in_ddp", "averages gradients itself"),
    ("zero1", "data_replaced", "The data of"),
    ("zero1", "skipped_on_one_rank", "Rank 0 called optimizer.step() (line"),
    ("zero1", "saved_on_one_rank", "Rank 0 saved or loaded the model's state (line"),
    ("zero1", "stepped_between", "between the model's call and its backward pass"),
    ("zero1", "hooked_gradients", "without running hooks"),
    ("fsdp", "clipped_by_hand", "multiplied by different numbers"),
    ("fsdp", "parameter_replaced", "The parameter temperature was replaced"),
    ("fsdp", "optimizer_state_of_rank_0", "was given the state of rank 0"),
    ("fsdp", "gradient_penalty", "create_graph=True"),
    ("fsdp", "loss_kept_on_the_model", "no backward pass came by what the model returned"),
    ("fsdp", "stepped_after_a_call", "no backward pass came by what the model returned"),
    ("fsdp", "skipped_before_clipping", "Rank 0 asked for a norm of gradients (line"),
    ("fsdp", "evaluated_on_one_rank", "Rank 0 called the model without gradients (line"),
    ("tp=2", "clipped_by_hand", "multiplied by different numbers"),
    ("tp=2", "gradient_penalty", "create_graph=True"),
    ("tp=2", "evaluated_on_parts", "were given different samples"),
    ("tp=2", "optimizer_state_of_plain_training", "has state already"),
]
RIGHT = [
    ("zero1", "gradient_penalty"),
    ("zero1", "updated_by_hand"),
    ("fsdp", "moving_average"),
    ("fsdp", "calls_in_flight"),
    ("fsdp", "state_saved_by_hand"),
    ("tp=2", "checkpointed"),
]


@pytest.mark.parametrize(("strategy", "name", "told"), REFUSED)
def test_refused(two_ranks: RankPool, strategy: str, name: str, told: str) -> None:
    for kind, message, _ in two_ranks(misuse_programs.under, strategy, name):
        assert kind == "refused" and told in message


@pytest.mark.parametrize(("strategy", "name"), RIGHT)
def test_right(two_ranks: RankPool, strategy: str, name: str) -> None:
    found = two_ranks(misuse_programs.under, strategy, name)
    assert misuse_programs.verdict(plainly(name), found, strategy) == "right", found[0][1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [program.__name__ for program in misuse_programs.NEW])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tp=2", "op=2", "fsdp,bf16"])
def test_never_silently_wrong(two_ranks: RankPool, strategy: str, name: str) -> None:
    found = two_ranks(misuse_programs.under, strategy, name)
    assert misuse_programs.verdict(plainly(name), found, strategy) != "WRONG"
