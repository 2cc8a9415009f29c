"""Recomputed blocks give the gradients that kept activations give, and keep less."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.assemble.recompute import recompute_blocks
from minimal import WIDTH, Block

Build = Callable[[], nn.Module]


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        q, k, v = self.mix(x).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], scale=scale)[:, 0]
        return x + F.dropout(self.out(mixed), self.dropout, self.training)


class Convolution(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


BUILDS: dict[str, Build] = {
    "block": Block,
    "dropout": lambda: Block(dropout=0.5),
    "attention": Attention,
    "convolution": Convolution,
    "cumulative": lambda: Convolution(momentum=None),
}


def made(build: Build, kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(build(), build())
    if kind != "none":
        recompute_blocks(list(model), kind)
    return model


def batch() -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(2)
    x = batch()
    loss = model(x).square().sum()
    loss.backward()
    return loss.detach(), [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("name", BUILDS)
def test_same_loss_and_gradients(name: str, kind: str) -> None:
    loss, gradients = step(made(BUILDS[name], "none"))
    again, found = step(made(BUILDS[name], kind))
    assert torch.equal(again, loss)
    for got, wanted in zip(found, gradients, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("name", ["convolution", "cumulative"])
def test_running_statistics_count_a_batch_once(name: str, kind: str) -> None:
    plain, recomputed = made(BUILDS[name], "none"), made(BUILDS[name], kind)
    for _ in range(2):
        step(plain)
        step(recomputed)
    for key, value in plain.state_dict().items():
        assert torch.equal(recomputed.state_dict()[key], value), key
    assert all(m.track_running_stats for m in recomputed.modules() if isinstance(m, nn.BatchNorm1d))


def saved_bytes(kind: str) -> int:
    """What autograd keeps between forward and backward, parameters left out."""
    model = made(Block, kind)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch()).sum()
    return sum(found.values())


def test_less_is_kept() -> None:
    assert 0 < saved_bytes("full") < saved_bytes("none") / 2


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def products(kind: str) -> int:
    model = made(Block, kind)
    with Counting() as counting:
        step(model)
    return counting.products


def test_selective_keeps_what_is_dear() -> None:
    """Matrix products are computed again under `full` only."""
    assert products("selective") == products("none")
    # The last product of each block need not be computed again: nothing before it waits for its result.
    assert products("none") < products("full") <= products("none") + 4


def test_nothing_is_recomputed_without_gradients() -> None:
    model = made(Block, "full").eval()
    with torch.no_grad():
        expected = made(Block, "none")(batch())
        assert torch.equal(model(batch()), expected)


def test_keyword_arguments_reach_the_block() -> None:
    plain, recomputed = Attention(), Attention()
    recomputed.load_state_dict(plain.state_dict())
    recompute_blocks([recomputed], "full")
    assert torch.equal(recomputed(batch(), scale=3.0), plain(batch(), scale=3.0))
    assert not torch.equal(recomputed(batch(), scale=3.0), plain(batch()))


class Remembers(nn.Module):
    """Attention that keeps what it has seen in an object that all blocks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: SimpleNamespace, outputs: list[Tensor]) -> Tensor:
        seen.tokens = x if seen.tokens is None else torch.cat([seen.tokens, x], dim=1)
        x = x + self.mix(seen.tokens).mean(1, keepdim=True) * (1 + len(outputs))
        outputs.append(x)
        return x


def remembered(kind: str, *, twice: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = [Remembers() for _ in range(3)]
    if kind != "none":
        recompute_blocks(blocks, kind)
    x, seen, outputs = batch(), SimpleNamespace(tokens=None), []
    y = x
    for block in blocks:
        y = block(y, seen, outputs)
    assert seen.tokens.shape[1] == 9 and len(outputs) == 3
    if twice:
        y.sum().backward(retain_graph=True)
        for block in blocks:
            block.zero_grad()
    y.sum().backward()
    return [block.mix.weight.grad for block in blocks]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_objects_are_given_again_as_they_were(kind: str, twice: bool) -> None:
    torch.testing.assert_close(remembered(kind, twice=twice), remembered("none", twice=twice), rtol=0, atol=0)


def test_an_object_that_cannot_be_copied_is_given_as_it_is() -> None:
    model = made(Locked, "full")
    model[0](batch(), threading.Lock()).sum().backward()


class Locked(Block):
    def forward(self, x: Tensor, lock: Any) -> Tensor:
        with lock:
            return super().forward(x)
