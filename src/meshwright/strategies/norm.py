"""The global norm of gradients that may be whole or sharded over any number of meshes."""

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
"""Elements whose squares a CPU may sum sequentially."""


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm over all gradients, the same number on every rank."""
    return global_square(gradients).sqrt()


@torch.no_grad()
def global_square(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of squares over all gradients, in fp64.

    Each rank sums the squares of what it holds, and reduces a sum only over the axes that its gradients are cut on.
    """
    groups: dict[tuple[torch.device, DeviceMesh | None, tuple[Any, ...]], list[torch.Tensor]] = {}
    for gradient in gradients:
        if type(gradient) is torch.Tensor:
            groups.setdefault((gradient.device, None, ()), []).append(gradient)
            continue
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
    # On CPUs `norm` sums sequentially, which loses up to 1e-3 over a million elements. `dot` over parts of a large
    # tensor loses 1e-5 at most and is as fast; many small tensors are faster in one call.
    small = [_wide(tensor) for tensor in tensors if tensor.numel() <= PART]
    parts = [p for t in tensors if t.numel() > PART for p in _wide(t).reshape(-1).split(PART)]
    squares = [torch.dot(part, part) for part in parts]
    if small:
        squares.append(torch.stack(foreach_norm(small)).square().sum())
    return torch.stack(squares).sum()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Cast to at least fp32, because squares of 16-bit numbers overflow."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@torch.no_grad()
def scale_(gradients: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply gradients in place, on any device."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(local(gradient))
    for (device, dtype), tensors in alike.items():
        foreach_mul_(tensors, factor.to(device, dtype) if torch.is_tensor(factor) else factor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if type(tensor) is not torch.Tensor and is_dtensor(tensor) else tensor


def _reduce(square: torch.Tensor, mesh: DeviceMesh | None, placements: tuple[Any, ...]) -> torch.Tensor:
    for axis, placement in enumerate(placements):
        if mesh is not None and placement.is_shard() and mesh.size(axis) > 1:
            dist.all_reduce(square, group=mesh.get_group(axis))
    return square
