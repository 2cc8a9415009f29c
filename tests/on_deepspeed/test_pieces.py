"""Stretches of flat tensors as boxes, and an optimizer of flat tensors as one of parameters. Needs no DeepSpeed."""

from math import prod

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from meshwright.checkpoint.parts import held_parts
from meshwright.strategies.cuts import Stretch
from meshwright.strategies.deepspeed.pieces import FlatPiece, OptimizerByName, ParameterGroup, even_stretch

SHAPES = [(5,), (3, 4), (2, 3, 4), (7, 1, 3), (1,), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_the_elements_in_their_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).reshape(shape)
    for start in range(prod(shape)):
        for stop in range(start + 1, prod(shape) + 1):
            found: list[int] = []
            for offsets, sizes in Stretch(shape=shape, start=start).boxes(stop - start):
                box = whole
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    box = box.narrow(dim, offset, size)
                found += box.reshape(-1).tolist()
            assert found == list(range(start, stop))


def test_a_stretch_is_laid_as_few_boxes() -> None:
    shape = (4, 5)
    laid = held_parts(torch.arange(3.0, 17.0), Stretch(shape=shape, start=3))
    assert laid.shape == shape
    assert [(part.offsets, tuple(part.tensor.shape)) for part in laid.parts] == [
        ((0, 3), (1, 2)),
        ((1, 0), (2, 5)),
        ((3, 0), (1, 2)),
    ]


def test_what_is_written_into_a_box_is_in_the_flat_tensor() -> None:
    flat = torch.zeros(7)
    for part in held_parts(flat, Stretch(shape=(3, 3), start=1)).parts:
        part.tensor.fill_(1.0)
    assert flat.eq(1).all()


def test_an_empty_stretch_has_no_boxes_and_still_a_shape() -> None:
    laid = held_parts(torch.empty(0), Stretch(shape=(3, 3), start=0))
    assert laid.parts == () and laid.shape == (3, 3)


@pytest.mark.parametrize(("elements", "ranks"), [(10, 4), (3, 4), (8, 2), (1, 3)])
def test_even_stretches_cover_a_tensor_once(elements: int, ranks: int) -> None:
    room = -(-elements // ranks)
    parts = [even_stretch((elements,), room, rank) for rank in range(ranks)]
    covered = [place for stretch, length in parts for place in range(stretch.start, stretch.start + length)]
    assert covered == list(range(elements))


def two_in_one() -> tuple[AdamW, list[FlatPiece], list[ParameterGroup]]:
    """Two parameters (one of them in part) in one flat tensor, and a group of which nothing is updated here."""
    flat = nn.Parameter(torch.arange(7.0))
    one, other, idle = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2, 5), (3,)))
    pieces = [
        FlatPiece("one", one, flat, 0, 4, Stretch(shape=(2, 2), start=0)),
        FlatPiece("other", other, flat, 4, 3, Stretch(shape=(2, 5), start=7)),
    ]
    optimizer = AdamW([flat], lr=0.5)
    groups = [
        ParameterGroup([idle], {"lr": 0.25}, None),
        ParameterGroup([piece.master for piece in pieces], optimizer.param_groups[0], 0),
    ]
    return optimizer, pieces, groups


def test_state_by_name_is_a_view_of_the_flat_state() -> None:
    optimizer, pieces, groups = two_in_one()
    flat = pieces[0].flat
    flat.grad = torch.ones(7)
    optimizer.step()
    by_name = OptimizerByName(optimizer, groups, pieces)
    state = by_name.state[pieces[1].master]
    assert state["exp_avg"].shape == (3,) and float(state["step"]) == 1.0
    state["exp_avg"].fill_(9.0)
    assert optimizer.state[flat]["exp_avg"][4:].eq(9.0).all()
    assert [group["lr"] for group in by_name.param_groups] == [0.25, 0.5]


def test_state_is_loaded_into_an_optimizer_that_has_none_yet() -> None:
    optimizer, pieces, groups = two_in_one()
    by_name = OptimizerByName(optimizer, groups, pieces)
    document = by_name.state_dict()
    document["param_groups"][1]["lr"] = 0.125
    document["state"] = {
        number: {"step": torch.tensor(3.0), "exp_avg": torch.full((n,), float(n)), "exp_avg_sq": torch.zeros(n)}
        for number, n in ((1, 4), (2, 3))
    }
    by_name.load_state_dict(document)
    state = optimizer.state[pieces[0].flat]
    assert state["exp_avg"].tolist() == [4.0] * 4 + [3.0] * 3 and float(state["step"]) == 3.0
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert by_name.param_groups[1]["lr"] == 0.125 and optimizer.param_groups[0]["params"][0] is pieces[0].flat
