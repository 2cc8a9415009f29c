"""Recorded programs of blocks that are computed again in backward."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.assemble.recompute import recompute_blocks
from meshwright.errors import Refused
from meshwright.strategies.tensor.mode import tensor_region
from meshwright.strategies.tensor.split import to_plain
from replayed_blocks import LENGTH, WIDTH, as_it_is, divide, dropout, plain_habit, replayed, run, states


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_recomputed_block_draws_the_same(tensor_mesh: DeviceMesh, kind: str) -> None:
    model, other, plain = (divide(dropout, tensor_mesh) for _ in range(3))
    for divided in (model, other):
        for block in divided.blocks:
            del block.batch_norm
        recompute_blocks(list(divided.blocks), kind)  # type: ignore[arg-type]
    for _ in range(4):
        found = run(model, tensor_mesh)
        assert found.equals(as_it_is(other, tensor_mesh))
        assert found.loss == pytest.approx(as_it_is(plain, tensor_mesh).loss)
    assert replayed(model) == 9, [state.reason for state in states(model)]


def test_recomputing_counts_a_batch_once(tensor_mesh: DeviceMesh) -> None:
    model, other = (divide(lambda block, x: block.batch_norm(x), tensor_mesh) for _ in range(2))
    recompute_blocks(list(model.blocks), "full")  # type: ignore[arg-type]
    for _ in range(3):
        assert run(model, tensor_mesh).equals(as_it_is(other, tensor_mesh))
    assert replayed(model) == 0, "both runs of a checkpointed block are those of its own code"


def test_a_checkpointed_block_that_changes_before_backward_is_refused(tensor_mesh: DeviceMesh) -> None:
    model = divide(plain_habit, tensor_mesh)
    for block in model.blocks:  # type: ignore[union-attr]
        del block.batch_norm
    recompute_blocks(list(model.blocks), "full")  # type: ignore[arg-type]
    for _ in range(2):
        run(model, tensor_mesh)
    x = torch.ones(2, LENGTH, WIDTH)
    with tensor_region(tensor_mesh), pytest.raises(Refused, match="Keep them until backward"):
        loss = to_plain(model(x), tensor_mesh).sum()
        model.blocks[1].factor = 3.0  # type: ignore[index]
        loss.backward()
