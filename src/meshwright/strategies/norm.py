"""The true global norm of gradients that may lie whole or in shards, over any number of meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm

from meshwright.recording.dtensor import is_dtensor
from meshwright.torch_private.foreach import foreach_mul_, foreach_norm

PART = 1 << 16
"""Elements whose squares a CPU may add one after another."""


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm over all gradients as one process would see them. All ranks get the same number."""
    return global_square(gradients).sqrt()


@torch.no_grad()
def global_square(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of squares over all gradients, in fp64 whatever the gradients are, so that ranks can add theirs up.

    Each rank sums the squares of what it holds; a sum travels only over the axes on which its gradients are cut.
    """
    groups: dict[tuple[torch.device, DeviceMesh | None, tuple[Any, ...]], list[torch.Tensor]] = {}
    for gradient in gradients:
        placed = (gradient.device_mesh, gradient.placements) if is_dtensor(gradient) else (None, ())
        groups.setdefault((gradient.device, *placed), []).append(local(gradient))
    squares = [_reduce(_squares(tensors), *key[1:]) for key, tensors in groups.items()]
    if not squares:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().double()


def _squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    if tensors[0].is_cuda:
        return _wide(get_total_norm(tensors)).square()
    # On CPUs `norm` adds one number after another, which loses up to 1e-3 over a million. `dot` over parts of a large
    # tensor loses 1e-5 at most and is as fast; many small tensors are faster in one call.
    small = [_wide(tensor) for tensor in tensors if tensor.numel() <= PART]
    parts = [p for t in tensors if t.numel() > PART for p in _wide(t).reshape(-1).split(PART)]
    squares = [torch.dot(part, part) for part in parts]
    if small:
        squares.append(torch.stack(foreach_norm(small)).square().sum())
    return torch.stack(squares).sum()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In fp32 at least: squares of what is smaller overflow."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@torch.no_grad()
def scale_(gradients: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply gradients in place, wherever they lie."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(local(gradient))
    for (device, dtype), tensors in alike.items():
        foreach_mul_(tensors, factor.to(device, dtype) if torch.is_tensor(factor) else factor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _reduce(square: torch.Tensor, mesh: DeviceMesh | None, placements: tuple[Any, ...]) -> torch.Tensor:
    for axis, placement in enumerate(placements):
        if mesh is not None and placement.is_shard() and mesh.size(axis) > 1:
            dist.all_reduce(square, group=mesh.get_group(axis))
    return square
