"""On two ranks: functions on divided tensors give what they give on whole ones, and models too."""

import pytest

import tensor_functions
import tensor_programs
from rank_pool import RankPool


@pytest.mark.slow
def test_every_function_forward_and_backward(two_ranks: RankPool) -> None:
    for differences in two_ranks(tensor_functions.function_differences):
        assert {name: value for name, value in differences.items() if not value <= 1e-5} == {}


@pytest.mark.parametrize("options", [(), ("sequence", "recompute")])
def test_a_model(two_ranks: RankPool, options: tuple[str, ...]) -> None:
    for result in two_ranks(tensor_programs.compare, "example", options):
        assert result.equal, result
        assert result.gathered == {} and result.local < 0.52


def test_whatever_its_author_does_with_activations(two_ranks: RankPool) -> None:
    result = two_ranks(tensor_programs.compare, "awkward")[0]
    assert result.equal, result
    assert set(result.gathered) == {"std", "__getitem__", "__setitem__", "sort"}


def test_backward_passes_of_ones_own(two_ranks: RankPool) -> None:
    """What an author recomputes, or differentiates himself, sees divided tensors as the forward pass did."""
    result = two_ranks(tensor_programs.compare, "own backward")[0]
    assert result.equal, result
    assert result.local < 0.6


def test_every_name_of_a_shared_module_is_cut(two_ranks: RankPool) -> None:
    names = two_ranks(tensor_programs.cut_names, "own backward")[0]
    assert "again.weight" in names and "up.weight" in names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "narrowed", "phi3-even"])
def test_fused_layers_come_apart_without_gathering(two_ranks: RankPool, name: str) -> None:
    result = two_ranks(tensor_programs.compare, name)[0]
    assert result.equal, result
    assert result.gathered == {}


@pytest.mark.slow
@pytest.mark.parametrize("then", ["read the tensor", "read the view"])
@pytest.mark.parametrize("dim", [1, 2])
def test_a_change_that_cannot_be_followed_is_refused(two_ranks: RankPool, dim: int, then: str) -> None:
    for said in two_ranks(tensor_functions.refusal, tensor_functions.change_a_view, dim, then):
        assert "changes a tensor in place" in said


@pytest.mark.slow
def test_a_parameter_that_changes_itself_is_refused(two_ranks: RankPool) -> None:
    for said in two_ranks(tensor_functions.refusal, tensor_functions.change_a_parameter):
        assert "changes a parameter of shape" in said


@pytest.mark.slow
def test_dropout_differs_between_ranks_and_can_be_drawn_again(two_ranks: RankPool) -> None:
    (first, again, after), (other, _, other_after) = two_ranks(tensor_functions.dropped)
    assert first.equal(again) and not first.equal(other)
    assert after == other_after
    assert 0.4 < float((first == 0).float().mean()) < 0.6


@pytest.mark.slow
def test_what_is_sent(two_ranks: RankPool) -> None:
    """Two sums a block forward and two backward; one each for embedding and head; two for the loss."""
    assert two_ranks(tensor_programs.collectives, "example")[0] == 2 * 4 + 2 + 2


@pytest.mark.slow
def test_a_plan_for_a_part_of_the_model(two_ranks: RankPool) -> None:
    assert two_ranks(tensor_programs.divides_a_stage)[0] == ["blocks.1.down.weight", "blocks.1.up.bias"]
