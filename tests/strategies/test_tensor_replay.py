"""Recorded programs of blocks: equal to them, and refused where they cannot be."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from meshwright.strategies.tensor import draft, replay
from replayed_blocks import WIDTH, as_it_is, divide, dropout, plain_habit, replayed, run, states


def no_grad_inside(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True) + 1
    return x / scale


def tensors_made_inside(block: Any, x: Tensor) -> Tensor:
    mask = torch.arange(x.shape[1])[None, :, None] < 2
    return x.masked_fill(mask, 0.0) * torch.tensor([2.0]) + torch.zeros_like(x)


def in_place(block: Any, x: Tensor) -> Tensor:
    y = torch.ones(3) * block.gain[:3]
    y += 1
    y[0] = 5.0
    return x * y.sum()


RECORDED = {
    "plain": plain_habit,
    "a tensor that no layer divides": lambda block, x: x * block.gain.exp(),
    "no_grad": no_grad_inside,
    "tensors made inside": tensors_made_inside,
    "dropout": dropout,
    "in place on a whole tensor": in_place,
    "statistics": lambda block, x: block.batch_norm(x),
    "several results": lambda block, x: (
        torch.cat([part * 2 for part in x.chunk(2, -1)][::-1], -1) + x.max(-1)[0][..., None]
    ),
}


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("name", RECORDED)
def test_a_program_is_its_block(tensor_mesh: DeviceMesh, monkeypatch: Any, name: str, rewritten: bool) -> None:
    """To the bit as recorded; to rounding once it is rewritten."""
    if not rewritten:
        monkeypatch.setattr(draft, "rewrite", lambda program, mesh, held: program)
    model, other = divide(RECORDED[name], tensor_mesh), divide(RECORDED[name], tensor_mesh)
    for _ in range(4):
        assert run(model, tensor_mesh).equals(as_it_is(other, tensor_mesh), 1e-5 if rewritten else 0.0)
    assert [state.reason for state in states(model)] == [""] * 3
    assert replayed(model) == 9 and replayed(other) == 0


def test_blocks_that_are_alike_share_code(tensor_mesh: DeviceMesh) -> None:
    model = divide(plain_habit, tensor_mesh)
    run(model, tensor_mesh)
    first, *others = [state.programs[0] for state in states(model)[1:]]  # the first one's input needs no gradient
    assert all(other.run.__code__ is first.run.__code__ for other in others)
    assert all(other.program.same_as(first.program) for other in others)


def count_calls(block: Any, x: Tensor) -> Tensor:
    block.calls += 1
    return x * block.calls


def keep_result(block: Any, x: Tensor) -> Tensor:
    block.seen.append(1)
    return x


def look_at_values(block: Any, x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 100 else x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


FAR = torch.full((WIDTH,), 3.0)


UNRECORDED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "counts its calls": (count_calls, "changes attributes"),
    "fills a list": (keep_result, "changes attributes"),
    "branches on values": (look_at_values, "depends on values"),
    "a shape of values": (lambda block, x: x + x[x > 0].sum(), "depends on values"),
    "an autograd function": (lambda block, x: Doubled.apply(x), "autograd function"),
    "checkpointing": (lambda block, x: checkpoint(torch.sin, x, use_reentrant=False), "saved tensors"),
    "a tensor from elsewhere": (lambda block, x: x * FAR, "from elsewhere"),
    "Python's random numbers": (lambda block, x: x * random.random(), "random"),
    "memory that is not filled": (lambda block, x: x + torch.empty(WIDTH).fill_(1.0), "cannot repeat"),
    "a hook on a tensor": (lambda block, x: (x.register_hook(lambda g: g * 2), x * 2)[1], "register_hook"),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_a_program_could_not_repeat_runs_as_it_is(tensor_mesh: DeviceMesh, name: str) -> None:
    habit, reason = UNRECORDED[name]
    model, other = divide(habit, tensor_mesh), divide(habit, tensor_mesh)
    for step in range(3):
        random.seed(step)
        found = run(model, tensor_mesh)
        random.seed(step)
        assert found.equals(as_it_is(other, tensor_mesh))
    assert all(reason in state.reason for state in states(model)), states(model)
    assert replayed(model) == 0


def test_blocks_without_a_program_are_named_once(tensor_mesh: DeviceMesh) -> None:
    def count(block: Any, x: Tensor) -> Tensor:
        block.calls += 1
        return x

    model = divide(count, tensor_mesh)
    with pytest.warns(UserWarning) as told:
        for _ in range(replay.ATTEMPTS + 2):
            run(model, tensor_mesh)
    (warning,) = [str(each.message) for each in told if "recorded program" in str(each.message)]
    assert warning.startswith("Block runs without") and warning.endswith("it changes attributes of its modules.")


def test_a_cache_is_named_with_what_to_do(tensor_mesh: DeviceMesh) -> None:
    class DynamicCache:
        """An object as transformers passes it on to blocks."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, cache: object) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    block, programs = Caching(), replay.BlockPrograms(tensor_mesh)
    with pytest.warns(UserWarning, match="an argument is a DynamicCache. Call the model with use_cache=False"):
        for _ in range(replay.ATTEMPTS):
            programs(block, block.forward, (torch.ones(1, WIDTH), DynamicCache()), {})


def test_a_profiler_is_left_alone(tensor_mesh: DeviceMesh) -> None:
    import cProfile

    model = divide(plain_habit, tensor_mesh)
    with cProfile.Profile():
        run(model, tensor_mesh)
        run(model, tensor_mesh)
    assert replayed(model) == 0 and [state.failures for state in states(model)] == [0] * 3
    run(model, tensor_mesh)
    run(model, tensor_mesh)
    assert replayed(model) == 3
