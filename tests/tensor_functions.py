"""What tests run on real ranks to see that functions of divided tensors return what those of whole ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

from meshwright.assemble.world import World
from meshwright.errors import Refused
from meshwright.strategies.tensor.layout import divided, local, part
from meshwright.strategies.tensor.memory import as_parameter
from meshwright.strategies.tensor.mode import tensor_region
from meshwright.strategies.tensor.split import to_plain

X, Y, ROW = (4, 8, 12), (4, 8, 12), (12,)
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "add": lambda x, y, row: x + y,
    "add a row": lambda x, y, row: x + row,
    "add a column": lambda x, y, row: x * y[:, :, :1] - y[:1],
    "from the right": lambda x, y, row: 1.0 / (2.0 + x * x) + torch.maximum(x, row),
    "activations": lambda x, y, row: F.gelu(x) * F.silu(y) + F.relu(x, inplace=False).tanh() + F.softplus(y),
    "where": lambda x, y, row: torch.where(x > 0, x, row).masked_fill(y > 1, 0.5).clamp(max=1.0),
    "power": lambda x, y, row: (x.pow(2) + 1).rsqrt() * x.float().sigmoid().double().to(x.dtype),
    "heads": lambda x, y, row: x.view(4, 8, 4, 3).transpose(1, 2) * 2,
    "heads and back": lambda x, y, row: x.unflatten(-1, (4, 3)).permute(0, 2, 1, 3).transpose(1, 2).flatten(2) * row,
    "flatten": lambda x, y, row: x.flatten(0, 1) * 2 + x.reshape(-1, 12),
    "flatten all": lambda x, y, row: x.reshape(-1).sin(),
    "unsqueeze": lambda x, y, row: (x[:, None].expand(-1, 2, -1, -1).reshape(8, 8, 12) * row).unsqueeze(-1).squeeze(-1),
    "expand": lambda x, y, row: x.unsqueeze(1).expand(4, 3, 8, 12).cos(),
    "repeat": lambda x, y, row: x.repeat(1, 2, 1).repeat_interleave(2, dim=-1),
    "split": lambda x, y, row: torch.cat([part * 2 for part in x.split(4, dim=1)], dim=1),
    "chunk": lambda x, y, row: [part.exp() for part in x.chunk(2, dim=-1)],
    "rotate": lambda x, y, row: torch.cat([-x[..., 6:], x[..., :6]], dim=-1) * y,
    "cut sizes": lambda x, y, row: [part + 1 for part in x.split([3, 9], dim=2)],
    "unbind": lambda x, y, row: [part * part for part in x.unbind(1)],
    "index": lambda x, y, row: x[:, 0] * 2,
    "last": lambda x, y, row: x[..., -1, None, :].sum(),
    "slices": lambda x, y, row: x[1:3, :, 2:10:2].exp() + x[1:3, 0:8, 0:8:2],
    "select": lambda x, y, row: x.select(1, 3) + x.narrow(1, 2, 1).squeeze(1),
    "gather": lambda x, y, row: x[torch.tensor([1, 3, 1])] * 3,
    "stack": lambda x, y, row: torch.stack([x, y, x], dim=1) * 2,
    "softmax": lambda x, y, row: F.softmax(x, dim=-1) + torch.log_softmax(y, 1),
    "means": lambda x, y, row: (x - x.mean(-1, keepdim=True)) * x.mean(1, keepdim=True) + x.sum(),
    "sums": lambda x, y, row: x.sum((0, 2)) + x.mean(dim=1).sum(),
    "variance": lambda x, y, row: x.var(-1) + x.norm(dim=-1),
    "layer norm": lambda x, y, row: F.layer_norm(x, (12,), row, row * 2) + F.rms_norm(y, (12,), row),
    "norm of two": lambda x, y, row: F.layer_norm(x, (8, 12)),
    "linear": lambda x, y, row: F.linear(x, y[0], y[0, :, 0]),
    "matmul": lambda x, y, row: x @ y.transpose(1, 2),
    "matmul rows": lambda x, y, row: x @ y[0].T,
    "matmul heads": lambda x, y, row: x.view(4, 8, 4, 3).transpose(1, 2) @ y.view(4, 8, 4, 3).permute(0, 2, 3, 1),
    "einsum": lambda x, y, row: torch.einsum("bsw,btw->bst", x, y),
    "attention": lambda x, y, row: F.scaled_dot_product_attention(x[:, :, None], y[:, :, None], x[:, :, None]),
    "cumulative": lambda x, y, row: x.cumsum(1).cumsum(2),
    "new": lambda x, y, row: x.new_ones(3) * x[0, 0, 0] + torch.zeros_like(x).sum() + torch.ones_like(x).mean(),
    "values": lambda x, y, row: x * float(y.detach().sum()) + (1.0 if bool((x > 100).any()) else 2.0),
    "in place": lambda x, y, row: (x * 1).add_(y).mul_(row).relu_() + F.relu(y * 2, inplace=True),
    "operators in place": lambda x, y, row: changed(x * 2, y, row),
    "items in place": lambda x, y, row: with_items(x * 2, y),
    "a view in place": lambda x, y, row: (x * 2).view(4, 8, 4, 3).transpose(1, 2).mul_(3.0),
    "a whole one in place": lambda x, y, row: torch.zeros(4, 8, 12).add_(x),
    "loss": lambda x, y, row: F.mse_loss(x, y, reduction="sum"),
    "classes": lambda x, y, row: F.cross_entropy(x.flatten(0, 1), torch.arange(32) % 12),
    "classes, some ignored": lambda x, y, row: F.cross_entropy(
        x.flatten(0, 1), torch.arange(32) % 13 - 1, ignore_index=-1, reduction="sum"
    ),
    "classes each": lambda x, y, row: F.cross_entropy(
        x.transpose(1, 2), (torch.arange(32) % 12).view(4, 8), reduction="none"
    ),
    "classes, smoothed": lambda x, y, row: F.cross_entropy(x[0], torch.arange(8), label_smoothing=0.1),
    "classes, weighted": lambda x, y, row: F.cross_entropy(x[0], torch.arange(8), weight=row.detach().abs()),
    "probabilities": lambda x, y, row: F.cross_entropy(x[0], y[0].softmax(-1)),
    "log likelihood": lambda x, y, row: F.nll_loss(F.log_softmax(x[0], dim=-1), torch.arange(8)),
}


def changed(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
    x += y
    x *= row
    x -= 1
    return x


def with_items(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1:3] = y[:, 0:2]
    x[..., 0] = 0.0
    return x


def function_differences(world: World) -> dict[str, float]:
    """How far each function on parts is from the same on whole tensors, for every way to divide its arguments."""
    mesh = init_device_mesh("cpu", (world.ranks,))
    found = {}
    for name, function in FUNCTIONS.items():
        for dims in [(0, None), (1, None), (2, None), (None, 2), (2, 2), (1, 2), (0, 1)]:
            found[f"{name} {dims}"] = _difference(function, dims, mesh)
    return found


def _difference(function: Callable[..., Any], dims: tuple[int | None, ...], mesh: DeviceMesh) -> float:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=generator, requires_grad=True) for shape in (X, Y, ROW)]
    expected = tree_leaves(function(*tensors))
    wanted = _gradients(expected, tensors)
    with tensor_region(mesh):
        given = [_divide(x, dim, mesh) for x, dim in zip(tensors, (*dims, None), strict=True)]
        results = to_plain(tree_leaves(function(*given)), mesh)
        found = _gradients(results, tensors)
    return max(_distance(a, b) for a, b in zip((*expected, *wanted), (*results, *found), strict=True))


def _divide(x: Tensor, dim: int | None, mesh: DeviceMesh) -> Tensor:
    return x if dim is None else divided(part(x, dim, mesh), dim, mesh)


def _gradients(results: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    total = torch.stack(
        [(result * torch.linspace(1, 2, result.numel()).view(result.shape)).sum() for result in results]
    )
    found = torch.autograd.grad(total.sum(), tensors, allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-3))


def refusal(world: World, change: Callable[..., None], *args: Any) -> str:
    """What every rank is told; raised, it would end the ranks."""
    with pytest.raises(Refused) as caught:
        change(world, *args)
    return str(caught.value)


def change_a_view(world: World, dim: int, then: str) -> None:
    """Change a view of a divided tensor, then read the tensor; or change the tensor, then read the view."""
    mesh = init_device_mesh("cpu", (world.ranks,))
    with tensor_region(mesh):
        x = _divide(torch.ones(4, 8, 12), dim, mesh) * 2
        view = x.view(4, 8, 4, 3)[:, 0]
        if then == "read the tensor":
            view.mul_(3.0)
            x.sum()
        else:
            x += 1
            view.sum()


def change_a_parameter(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.ranks,))
    layer = nn.Linear(4, 4)
    with tensor_region(mesh):
        as_parameter(divided(layer.weight, 0, mesh)).data.clamp_(max=0.0)


def dropped(world: World) -> tuple[Tensor, Tensor, float]:
    """This rank's part after dropout, the same computed again from the same state, and a number drawn afterwards."""
    mesh = init_device_mesh("cpu", (world.ranks,))

    def draw() -> Tensor:
        torch.manual_seed(5)
        with tensor_region(mesh):
            return local(F.dropout(_divide(torch.ones(64, 8), 1, mesh), 0.5))  # type: ignore[arg-type]

    first, second = draw(), draw()
    return first, second, float(torch.rand(()))
