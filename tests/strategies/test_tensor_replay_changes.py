"""Programs of blocks that change later: each change is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import Refused
from meshwright.strategies.tensor import draft
from meshwright.strategies.tensor.replay import program_state
from replayed_blocks import WIDTH, Block, as_it_is, divide, plain_habit, replayed, run, states

SCALE = 1.0


class Settings:
    scale = 1.0

    def __init__(self) -> None:
        self.shift = 0.0


SETTINGS = Settings()


def set_global(model: Any) -> None:
    globals()["SCALE"] = 3.0


def set_object(model: Any) -> None:
    SETTINGS.shift = 0.5


def set_attribute(model: Any) -> None:
    model.blocks[1].factor = 2.0


def set_class(model: Any) -> None:
    Block.bend = 1.5


def freeze(model: Any) -> None:
    model.blocks[0].up.weight.requires_grad_(False)


def replace_parameter(model: Any) -> None:
    model.blocks[0].gain = nn.Parameter(torch.full((WIDTH,), 5.0))


def add_hook(model: Any) -> None:
    model.blocks[1].norm.register_forward_hook(lambda module, args, output: output * 2)


def add_hook_on_block(model: Any) -> None:
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 2)


def replace_module(model: Any) -> None:
    model.blocks[1].norm = nn.Identity()


def replace_forward(model: Any) -> None:
    model.blocks[1].norm.forward = lambda x: x * 3


def change_list(model: Any) -> None:
    model.blocks[1].seen.append(2)


CHANGES = [
    *(set_global, set_object, set_attribute, set_class, freeze, replace_parameter, add_hook, add_hook_on_block),
    *(replace_module, replace_forward, change_list),
    lambda model: model.eval(),
    lambda model: model.blocks[2].eval(),
]


def many_reads(block: Any, x: Tensor) -> Tensor:
    x = x * block.factor * SCALE + SETTINGS.shift + len(block.seen)
    return block.drop(x) * block.gain * block.bend


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later_is_noticed(tensor_mesh: DeviceMesh, change: Callable[[Any], None]) -> None:
    before = SCALE, SETTINGS.shift, Block.bend
    try:
        model, other = divide(many_reads, tensor_mesh), divide(many_reads, tensor_mesh)
        for _ in range(2):
            first = run(model, tensor_mesh)
            assert first.equals(as_it_is(other, tensor_mesh))
        assert replayed(model) == 3
        change(model)
        change(other)
        for _ in range(3):
            found = run(model, tensor_mesh)
            assert found.equals(as_it_is(other, tensor_mesh))
        assert not found.equals(first) or change is freeze
    finally:
        globals()["SCALE"], SETTINGS.shift, Block.bend = before


def test_another_shape_and_no_gradients_are_other_programs(tensor_mesh: DeviceMesh) -> None:
    model, other = divide(plain_habit, tensor_mesh), divide(plain_habit, tensor_mesh)
    for samples in (2, 4, 2, 4):
        assert run(model, tensor_mesh, samples).equals(as_it_is(other, tensor_mesh, samples))
    assert [len(state.programs) for state in states(model)] == [2] * 3 and replayed(model) == 6
    with torch.no_grad():
        for _ in range(2):
            assert run(model, tensor_mesh).equals(as_it_is(other, tensor_mesh))
    assert [len(state.programs) for state in states(model)] == [3] * 3 and replayed(model) == 9


def test_a_program_that_became_stale_is_found(tensor_mesh: DeviceMesh) -> None:
    model = divide(plain_habit, tensor_mesh)
    run(model, tensor_mesh)
    right = run(model, tensor_mesh)
    block = model.blocks[1]  # type: ignore[index]
    plant_blind_conditions(block)
    block.factor = 2.0
    assert run(model, tensor_mesh).equals(right), "the planted program does not see the change"
    with pytest.raises(Refused, match="MESHWRIGHT_PROGRAMS=0"):
        for _ in range(draft.CHECKED):
            run(model, tensor_mesh)


def plant_blind_conditions(block: Any) -> None:
    """Conditions that hold whatever the block's factor is."""
    bound = program_state(block).programs[0]
    match = bound.match

    def blind(args: Any, kwargs: Any) -> Any:
        factor, block.factor = block.factor, 1.0
        try:
            return match(args, kwargs)
        finally:
            block.factor = factor

    bound.match = blind
