"""Cheap functions that run again in backward: the same gradients, little memory, and no wrong values unnoticed."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.assemble.recompute import recompute_blocks
from meshwright.assemble.selective import is_recomputing
from meshwright.errors import JobError

WIDTH = 8


class Body(nn.Module):
    """A block that computes one function of a product and of its input."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(3)
        self.table = nn.Parameter(torch.randn(5, WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self, self.up(x), x))


class Doubled(torch.autograd.Function):
    """An author's function that saves its input and changes a copy of it unseen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x * 1
        torch.from_numpy(y.numpy())[:] *= 2  # as a collective or a kernel writes, without telling autograd
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


def changes_a_part(body: Body, u: Tensor, x: Tensor) -> Tensor:
    y = u.sigmoid()
    z = y * x
    y = y + 1
    y[:, 0] = 0.5
    y[..., :2] *= 3
    return y * z


def adds_in_place(body: Body, u: Tensor, x: Tensor) -> Tensor:
    y = u * 2
    y += x
    y = F.relu(y, inplace=True)
    return (y * x).mul_(0.5).add_(u)


def changes_what_was_read(body: Body, u: Tensor, x: Tensor) -> Tensor:
    table = body.table.detach().clone()
    z = (u + table[0]).tanh()  # is made again from the table
    table.zero_()
    return z * u


def through_complex(body: Body, u: Tensor, x: Tensor) -> Tensor:
    y = torch.view_as_complex((u * 2).unflatten(-1, (-1, 2)).contiguous())
    turn = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2.0))
    return torch.view_as_real(y * turn).flatten(-2).exp()


def long_chain(body: Body, u: Tensor, x: Tensor) -> Tensor:
    for _ in range(1500):
        u = u * 0.999
    return u.exp()


def in_autocast(body: Body, u: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.logaddexp(u * 2, x).softmax(-1) * body.up(x)
    return y.float().sin()


def checkpoints_itself(body: Body, u: Tensor, x: Tensor) -> Tensor:
    return checkpoint(lambda a: F.gelu(a * 2).tanh(), u + 1, use_reentrant=False) * u.sigmoid()


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "views": lambda body, u, x: (
        (u.sigmoid().transpose(1, 2)[:, 1:-1] * 2).exp().transpose(1, 2).repeat(1, 1, 2)[..., 4:]
    ),
    "softmax": lambda body, u, x: (u @ x.transpose(1, 2)).softmax(-1) @ F.layer_norm(x + u, (WIDTH,)),
    "joined": lambda body, u, x: torch.cat([u.tanh(), x.exp()], 1).roll(1, 1)[:, :3] * torch.stack([u, x]).sigmoid()[1],
    "looked up": lambda body, u, x: body.table[torch.tensor([0, 4, 1])] * u.exp() + F.normalize(u, dim=-1),
    "batch norm": lambda body, u, x: F.relu(body.norm(u), inplace=True) * u,
    "dropout": lambda body, u, x: F.dropout(u.tanh(), 0.5) * (x + u).exp(),
    "instance norm": lambda body, u, x: F.instance_norm(u, torch.zeros(3), torch.ones(3)).exp(),
    "author's function": lambda body, u, x: Doubled.apply(u.exp()).sin() * u,
    "no gradients": lambda body, u, x: u.exp() * torch.no_grad()(lambda: (x * 2).tanh())(),
    "inference": lambda body, u, x: (u.exp() + torch.inference_mode()(lambda: torch.ones(WIDTH))()).sin(),
    "parts": changes_a_part,
    "in place": adds_in_place,
    "changed": changes_what_was_read,
    "complex": through_complex,
    "chain": long_chain,
    "autocast": in_autocast,
    "checkpoint": checkpoints_itself,
}


def built(function: Callable[..., Tensor], *, recomputed: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Body(function), Body(function))
    if recomputed:
        recompute_blocks(list(model), "selective")
    return model


def step(model: nn.Module, passes: int = 1) -> list[Tensor | None]:
    torch.manual_seed(2)
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    loss = model(x).square().sum()
    for _ in range(passes):
        loss.backward(retain_graph=passes > 1)
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def same(found: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_to_the_bit(name: str) -> None:
    plain, recomputed = (built(FUNCTIONS[name], recomputed=again) for again in (False, True))
    for passes in (1, 2):
        assert same(step(recomputed, passes), step(plain, passes))


def test_second_derivatives() -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 2 * 3 * WIDTH).view(2, 3, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), list(model.parameters()), allow_unused=True))

    function = FUNCTIONS["softmax"]
    plain, recomputed = (penalty(built(function, recomputed=again)) for again in (False, True))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(recomputed, plain, strict=True))


def test_no_change_goes_unnoticed() -> None:
    def late(body: Body, u: Tensor, x: Tensor) -> Tensor:
        body.kept = u.detach()
        return (u + x).exp()  # saves its result, which is made again from `u`

    model = built(late, recomputed=True)
    loss = model(torch.randn(2, 3, WIDTH)).sum()
    model[0].kept.zero_()
    with pytest.raises(JobError, match="changed in place"):
        loss.backward()


def test_nothing_runs_again_without_need() -> None:
    """Only the functions whose results were saved run again, once each, and not in evaluation."""
    runs: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if is_recomputing():
                runs.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    model = built(lambda body, u, x: F.gelu(u) + u.cos().sum(-1, keepdim=True), recomputed=True)
    with Watch():
        with torch.no_grad():
            model(torch.randn(2, 3, WIDTH))
        step(model)
    assert sorted(run for run in runs if run != "as_strided") == ["add", "add", "gelu", "gelu"]


def test_memory_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        model = built(FUNCTIONS["softmax"], recomputed=True)
        found: list[weakref.ref[Any]] = []
        body = model[0].function
        model[0].function = lambda *args: (found.append(weakref.ref(args[1].untyped_storage())), body(*args))[1]
        step(model)
        assert found and all(one() is None for one in found)
        model(torch.randn(2, 3, WIDTH))  # no backward pass comes
        assert all(one() is None for one in found)
    finally:
        gc.enable()


def kept_bytes(function: Callable[..., Tensor], *, recomputed: bool) -> int:
    """Bytes that live between forward and backward, without parameters."""
    from meshwright.tracing.meter import Meter

    model, x = built(function, recomputed=recomputed), torch.randn(2, 3, WIDTH)
    with Meter(lambda run: None) as meter:
        meter.known([*model.parameters(), *model.buffers(), x])
        loss = model(x).sum()
        return meter.live if loss.requires_grad else 0


@pytest.mark.parametrize("name", ["softmax", "views", "in place", "batch norm"])
def test_less_is_kept(name: str) -> None:
    assert kept_bytes(FUNCTIONS[name], recomputed=True) < kept_bytes(FUNCTIONS[name], recomputed=False)
